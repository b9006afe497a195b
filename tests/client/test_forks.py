"""The blocking client in forked children: it opens again what it needs there, and the parent notices nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.client.conftest import ClusterThread

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

FORK = """
import multiprocessing, os, sys, threading, traceback
import cepheid, cepheid.sync

def in_child(work):
    '''Run work in a forked child, and end it as a program ends.'''
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

def refused(kind, work):
    try:
        work()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind} was not raised")

client = cepheid.sync.connect(URL)
"""


def run(cluster: ClusterThread, topic: str, code: str, before: str = "") -> str:
    """Run a program in a process of its own, which must not write to its standard error; return what it printed."""
    program = f"{before}\nURL, TOPIC = {cluster.url!r}, {topic!r}\n{FORK}\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


PRODUCER = """
producer, reader = client.producer(TOPIC, schema=str), client.reader(TOPIC, schema=str)
name = producer.name
producer.send("parent")
def child():
    producer.send("child")
    assert producer.name != name
    in_child(lambda: producer.send("grandchild"))
    producer.send("child again")
in_child(child)
in_child(lambda: None)                  # uses nothing, and leaves everything alone
producer.send("parent again")
assert producer.name == name
print([reader.read(30).value for _ in range(5)], reader.has_message_available())
client.close()
"""


def test_a_producer_publishes_in_the_child_and_in_the_parent(cluster: ClusterThread, topic: str) -> None:
    assert run(cluster, topic, PRODUCER) == "['parent', 'child', 'grandchild', 'child again', 'parent again'] False\n"


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_the_parents_connection_and_its_end_are_its_own(cluster: ClusterThread, topic: str, loops: str) -> None:
    if loops == "uvloop":
        pytest.importorskip("uvloop")
    code = """
producer = client.producer(TOPIC)
connection = next(iter(client._client._pool._open.values()))
ready, go_on = os.pipe(), os.pipe()
if os.fork() == 0:
    producer.send(b"child")
    os.write(ready[1], b".")
    os.read(go_on[0], 1)
    client.close()
    os._exit(0)
os.read(ready[0], 1)
for number in range(100):
    producer.send(b"%d" % number)
assert connection.is_open and next(iter(client._client._pool._open.values())) is connection
client.close()                          # the child holds no copy of its socket, so the broker sees the end
"""
    code += f"""
import json, time, urllib.request
stats = "{cluster.admin_url}/admin/v2/persistent/public/default/{topic}/stats"
deadline = time.monotonic() + 30
while len(json.load(urllib.request.urlopen(stats))["publishers"]) != 1:
    assert time.monotonic() < deadline
    time.sleep(0.01)
os.write(go_on[1], b".")
os.wait()
print("end")
"""
    before = "import asyncio, uvloop; asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())" if loops == "uvloop" else ""
    assert run(cluster, topic, code, before) == "end\n"


CONSUMER = """
producer = client.producer(TOPIC, batching=False)
consumer = client.consumer(TOPIC, "s", type="shared", receiver_queue=1)
producer.send(b"held by the parent")
held = consumer.receive(30)
def child():
    later = lambda held: consumer.retry_later(held, 1)
    for use in (consumer.ack, consumer.ack_nowait, consumer.ack_cumulative, consumer.nack, later):
        assert "in the process that received it" in refused(cepheid.UsageError, lambda: use(held))
    refused(cepheid.TimedOutError, lambda: consumer.receive(0.1))
    producer.send_all(b"%d" % number for number in range(10))
    got = {}
    while len(got) < 3:
        message = consumer.receive(30)
        got[message.data] = message
        consumer.ack(message)
    assert b"held by the parent" not in got
    consumer.close()                    # the rest is the parent's
in_child(child)
consumer.ack(held)
rest = []
while len(rest) < 7:
    message = consumer.receive(30)
    rest.append(message.data)
    consumer.ack(message)
refused(cepheid.TimedOutError, lambda: consumer.receive(0.2))
print(len(set(rest)))
client.close()
"""


def test_a_consumer_joins_its_subscription_again_in_the_child(cluster: ClusterThread, topic: str) -> None:
    assert run(cluster, topic, CONSUMER) == "7\n"


READER = """
client.producer(TOPIC).send_all(b"%d" % number for number in range(5))
reader, other = client.reader(TOPIC), client.reader(TOPIC)
first = reader.read(30)
other.seek(first.message_id, inclusive=True)
in_child(lambda: print([reader.read(30).data for _ in range(4)], reader.has_message_available(), other.read(30).data))
print([reader.read(30).data for _ in range(4)], reader.has_message_available(), other.read(30).data)
"""


def test_a_reader_goes_on_in_the_child_where_it_was(cluster: ClusterThread, topic: str) -> None:
    assert run(cluster, topic, READER) == "[b'1', b'2', b'3', b'4'] False b'0'\n" * 2


def test_a_reader_of_partitions_goes_on_in_the_child_where_it_was(cluster: ClusterThread, topic: str) -> None:
    cluster.create_partitions(topic, 3)
    code = """
client.producer(TOPIC, batching=False).send_all(b"%d" % number for number in range(9))
reader = client.reader(TOPIC)
before = {reader.read(30).data for _ in range(4)}
def child():
    after = {reader.read(30).data for _ in range(5)}
    assert len(before | after) == 9 and not reader.has_message_available()
in_child(child)
child()
"""
    assert run(cluster, topic, code) == ""


TABLE_VIEW = """
producer, view = client.producer(TOPIC, schema=str), client.table_view(TOPIC, schema=str)
producer.send("one", key="k")
view.refresh()
changes = view.watch()
watching = threading.Thread(target=lambda: next(changes))
watching.start()
while not view._opened._watches:        # it begins with the first `next`
    pass
producer.send("two", key="k")
watching.join()
def child():
    producer.send("three", key="k")
    view.refresh()
    assert view["k"] == "three"
    assert "call watch in the child" in refused(cepheid.UsageError, lambda: next(changes))
in_child(child)
view.refresh()
print(view["k"], next(changes).value)
"""


def test_a_table_view_follows_its_topic_in_the_child(cluster: ClusterThread, topic: str) -> None:
    assert run(cluster, topic, TABLE_VIEW) == "three three\n"


def test_workers_of_multiprocessing_publish(cluster: ClusterThread, topic: str) -> None:
    code = """
producer = client.producer(TOPIC, schema=str)
producer.send("parent")
def publish(number):
    producer.send(str(number))
with multiprocessing.get_context("fork").Pool(3) as pool:
    pool.map(publish, range(6), chunksize=1)
reader = client.reader(TOPIC, schema=str)
print(sorted(reader.read(30).value for _ in range(7)))
"""
    assert run(cluster, topic, code) == "['0', '1', '2', '3', '4', '5', 'parent']\n"


REFUSED = """
named, exclusive = client.producer(TOPIC, name="mine"), client.consumer(TOPIC, "s")
fencing = client.producer(f"{TOPIC}-fenced", access="exclusive_with_fencing")
closed, closed_client = client.producer(TOPIC), cepheid.sync.connect(URL)
closed.close()
closed_client.close()
def child():
    assert "under another name" in refused(cepheid.BusyError, lambda: named.send(b""))
    assert "of a shared type" in refused(cepheid.BusyError, lambda: exclusive.receive(1))
    assert "call client.producer in the child" in refused(cepheid.UsageError, lambda: fencing.send(b""))
    assert "closed" in refused(cepheid.ClosedError, lambda: closed.send(b""))
    assert "closed" in refused(cepheid.ClosedError, lambda: closed_client.producer(TOPIC))
    client.close()
    assert "closed" in refused(cepheid.ClosedError, lambda: client.producer(TOPIC))
in_child(child)
named.send(b"parent")
fencing.send(b"parent")
print(exclusive.receive(30).data)
"""


def test_what_a_child_cannot_share_is_refused(cluster: ClusterThread, topic: str) -> None:
    assert run(cluster, topic, REFUSED) == "b'parent'\n"


def test_a_child_that_ends_in_a_block_leaves_the_message_to_its_parent(cluster: ClusterThread, topic: str) -> None:
    code = """
producer, consumer = client.producer(TOPIC), client.consumer(TOPIC, "s", type="shared")
producer.send(b"")
with client, consumer.processing(consumer.receive(30)):
    if (child := os.fork()) == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    refused(cepheid.TimedOutError, lambda: consumer.receive(0.2))
"""
    assert run(cluster, topic, code) == ""


LOCKS = """
producer = client.producer(TOPIC)
for lock in (client._lock, producer._lock, client._thread._lock):
    threading.Thread(target=lambda lock=lock: lock.acquire()).start()
in_child(lambda: producer.send(b"child"))
print("end")
sys.stdout.flush()
os._exit(0)
"""


def test_locks_that_other_threads_held_do_not_block_the_child(cluster: ClusterThread, topic: str) -> None:
    assert run(cluster, topic, LOCKS) == "end\n"


def test_children_that_are_forked_while_others_publish(cluster: ClusterThread, topic: str) -> None:
    code = """
producer, reader = client.producer(TOPIC), client.reader(TOPIC)
def publish():
    for number in range(300):
        producer.send(b"%d" % number)
threads = [threading.Thread(target=publish) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(5):
    in_child(lambda: producer.send(b"child"))
for thread in threads:
    thread.join()
got = [reader.read(30).data for _ in range(905)]
print(got.count(b"child"), len(set(got)), reader.has_message_available())
"""
    assert run(cluster, topic, code) == "5 301 False\n"


def test_credentials_that_were_being_fetched_are_fetched_in_the_child(cluster: ClusterThread, topic: str) -> None:
    code = """
credentials = cepheid.ClientCredentials("http://127.0.0.1:1", "id", "secret")
threading.Thread(target=credentials._lock.acquire).start()
in_child(lambda: print("does not answer" in refused(Exception, credentials)))
"""
    assert run(cluster, topic, code) == "True\n"
