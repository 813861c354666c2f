"""What a workload would do on a machine: cache sizes, tiers, hit curves. Nothing is started."""
