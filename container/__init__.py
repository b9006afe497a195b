"""The container image of the server: what it contains, and how it is built without a container engine."""
