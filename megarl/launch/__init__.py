"""Gets runs onto clusters: SLURM and Ray jobs. Not what happens inside of a run: that is megarl/cluster's."""
