"""`cepheid topics`, `subscriptions`, `schemas`, `namespaces`, `tenants`: the admin API as commands."""
