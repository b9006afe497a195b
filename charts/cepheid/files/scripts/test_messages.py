"""`helm test`: publish messages, consume them, and read them back from storage. CEPHEID_URL and CEPHEID_ADMIN_URL say where.

With the argument --spark, Spark reads them from storage as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT_S = 100
MESSAGES = 10
SCRATCH = os.environ.get("HOME", "/tmp")
"""Where Spark may write: the only place with room in a pod whose root file system is read-only."""


def main() -> None:
    topic = f"persistent://public/default/helm-test-{int(time.time() * 1000)}"
    sent = [f"message {number}" for number in range(MESSAGES)]
    step("publish", "produce", topic, *sent)
    consumed = step("consume", "consume", topic, "--subscription=helm-test", "--earliest", f"--count={MESSAGES}")
    missing = [message for message in sent if message not in consumed]
    if missing:
        sys.exit(f"consumed without {', '.join(missing)}; got:\n{consumed}")
    admin_url = os.environ["CEPHEID_ADMIN_URL"]
    if token_file := os.environ.get("CEPHEID_TOKEN_FILE"):  # this command knows the token itself only
        os.environ["CEPHEID_TOKEN"] = Path(token_file).read_text().strip()
    read = step("read from storage", "read", topic, "--format=json", "--columns=value", f"--admin-url={admin_url}")
    rows = [json.loads(line) for line in read.splitlines() if line.strip()]
    if len(rows) != MESSAGES:
        sys.exit(f"read {len(rows)} messages from storage instead of {MESSAGES}:\n{read}")
    if "--spark" in sys.argv[1:]:
        count_with_spark(topic)
    step("delete the topic", "topics", "delete", topic, "--force")
    print(f"all well: {MESSAGES} messages")


def count_with_spark(topic: str) -> None:
    """Count the messages of the topic with Spark, whose driver and executor are this process and its children."""
    began = time.monotonic()
    from pyspark.sql import SparkSession

    settings = {
        "spark.ui.enabled": "false",
        "spark.local.dir": SCRATCH,
        "spark.sql.warehouse.dir": f"{SCRATCH}/warehouse",
        "spark.driver.memory": "640m",  # the pod's limit has room for the workers as well
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={SCRATCH}",
    }
    session = SparkSession.builder.master("local[2]").appName("helm-test").config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    messages = session.read.format("cepheid").option("service.url", os.environ["CEPHEID_URL"]).option("topics", topic).load()
    count = messages.count()
    session.stop()
    if count != MESSAGES:
        sys.exit(f"Spark counted {count} messages in storage instead of {MESSAGES}")
    print(f"read with Spark: {time.monotonic() - began:.1f} s", flush=True)


def step(what: str, *command: str) -> str:
    """Run one command of `cepheid` and return what it printed; end with its message when it fails."""
    began = time.monotonic()
    try:
        done = subprocess.run(["cepheid", *command], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        sys.exit(f"{what}: no answer within {TIMEOUT_S} s: {error.stderr or error.stdout or ''}")
    if done.returncode != 0:
        sys.exit(f"{what} failed with exit code {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
