"""By this module Spark finds the format "cepheid". Imported whenever Spark looks up any source: it must be tiny and never fail."""
