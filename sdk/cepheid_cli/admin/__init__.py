"""`cepheid topics`, `subscriptions`, `namespaces`, `tenants`: the admin API as commands."""
