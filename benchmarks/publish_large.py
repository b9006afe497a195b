"""How many megabytes a second can one producer publish in large entries? 64 KB each, pipelined, durable before each receipt."""

from benchmarks import publish_single

if __name__ == "__main__":
    publish_single.main("publish_large", entry_bytes=64_000, window=250, description=__doc__)
