"""One job of a scheduler from the configuration of a run: trainers by torchrun, vLLM servers, logs, `--resume`.

settings   flags of `treewise launch`
job        the run and its nodes, checked: what a job is made of
render     the job as a script of Slurm or of this machine, or as manifests of Kubernetes
templates  `trainer` and `server` run on the nodes, whatever the scheduler; one more for each scheduler starts them
"""
