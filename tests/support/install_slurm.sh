#!/usr/bin/env bash
# Installs SLURM from the distribution's packages, for the tests marked slurm: they bring up a cluster of their own and
# touch neither the configuration nor the services of the machine.
set -euo pipefail

if command -v slurmctld slurmd sbatch munged >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "megarl: the tests marked slurm need SLURM, root and Debian or Ubuntu. Install slurmctld, slurmd, the client" >&2
  echo "commands and munge yourself, or run the other tests: .venv/bin/python -m pytest -m 'not slurm and not gpu'" >&2
  exit 2
fi
echo "== installing SLURM's packages, once"
export DEBIAN_FRONTEND=noninteractive
# Nothing is started: the services are of no use here.
apt-get -qq update
apt-get -qq install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2 >/dev/null
