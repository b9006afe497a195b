"""A cluster of processes on this machine: ZooKeeper, bookies, brokers. The base of `cepheid dev` and the chaos tests."""
