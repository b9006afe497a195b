"""A cluster of processes on this machine: ZooKeeper, bookies, brokers. What `cepheid dev` and the chaos tests stand on."""
