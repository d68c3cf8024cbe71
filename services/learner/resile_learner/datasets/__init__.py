"""The data that jobs train on: fetched once per host into a bounded cache."""
