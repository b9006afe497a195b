"""URLs of object stores: what is taken, and what each refusal says."""

from __future__ import annotations

import pytest

from cepheid_tiered import StoreLocation, StoreLocationError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket", StoreLocation("s3", "bucket")),
        ("s3://bucket/a/b/", StoreLocation("s3", "bucket", "a/b")),
        ("gs://my.bucket-1/x", StoreLocation("gs", "my.bucket-1", "x")),
        ("abfs://container/x", StoreLocation("abfs", "container", "x")),
        (
            "abfs://container@account.dfs.core.windows.net/x",
            StoreLocation("abfs", "container@account.dfs.core.windows.net", "x"),
        ),
        ("file:///mnt/archive", StoreLocation("file", "", "mnt/archive")),
        (
            "s3://bucket/p?endpoint=http://127.0.0.1:5000/&region=eu-west-1",
            StoreLocation("s3", "bucket", "p", "eu-west-1", "http://127.0.0.1:5000"),
        ),
    ],
)
def test_urls_are_taken_apart_and_put_together(text: str, url: StoreLocation) -> None:
    assert StoreLocation.parse(text) == url
    assert StoreLocation.parse(str(url)) == url


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not the URL of an object store: write s3://"),
        ("bucket/prefix", "is not the URL of an object store"),
        ("ftp://bucket", "unknown scheme 'ftp': s3://, gs://, abfs://, file:// are possible"),
        ("s3a://bucket", "did you mean s3://"),
        ("gcs://bucket", "did you mean gs://"),
        ("abfss://bucket", "did you mean abfs://"),
        ("https://minio:9000/bucket", r"names a server, not a bucket: write s3://bucket/prefix\?endpoint=https://host:port"),
        ("s3://", "names no bucket: write s3://bucket/prefix"),
        ("s3:///prefix", "names no bucket"),
        ("abfs:///prefix", "names no container"),
        ("s3://localhost:9000/bucket", "is a host and a port, not a bucket"),
        ("s3://Bucket", "cannot name a bucket"),
        ("s3://[oops", "cannot be read"),
        ("s3://AKIA:hush@bucket/prefix", "something before an @.*AWS_ACCESS_KEY_ID"),
        ("abfs://container:hush@account.dfs.core.windows.net/x", "something before an @.*AZURE_STORAGE_ACCOUNT_NAME"),
        ("abfs://container@example.org/x", "something before an @.*AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3://bucket?aws_secret_access_key=hush", "carries 'aws_secret_access_key'.*leave it out.*AWS_SECRET_ACCESS_KEY"),
        ("abfs://bucket?sas=hush", "carries 'sas'"),
        ("s3://bucket?regoin=x", "unknown option 'regoin'.*did you mean region"),
        ("s3://bucket?colour=red", "unknown option 'colour' in the URL: region and endpoint are possible$"),
        ("s3://bucket?region=", "region must be a name such as eu-west-1, got ''"),
        ("s3://bucket?region=a&region=b", "region is there twice"),
        ("s3://bucket?endpoint=minio:9000", "endpoint must be http://host:port"),
        ("s3://bucket?endpoint=http://u:hush@minio", "the endpoint has a user or a password"),
        ("s3://bucket/a/../b", "a step that is empty"),
        ("s3://bucket/a//b", "a step that is empty"),
        ("s3://bucket/a b", "the prefix has the character ' '"),
        ("s3://bucket/a%2Fb", "the prefix has the character '%'"),
        ("s3://bucket/p#x", "has a fragment"),
        ("file://host/path", "write three slashes"),
        ("file:///", "has no path"),
        ("file:///path?region=x", "takes no option"),
        ("s3://bucket/" + "x" * 900, "has 912 characters, at most 800"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(StoreLocationError, match=says) as refused:
        StoreLocation.parse(text)
    assert "hush" not in str(refused.value), "a secret is not repeated"
