"""What should run where: pure functions from a topology, a model card and a workload to plans and refusals."""
