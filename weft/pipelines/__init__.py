"""Pipeline parallelism: layers in stages, micro-batches in flight, and the schedules."""
