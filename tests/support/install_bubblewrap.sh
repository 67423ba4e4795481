#!/usr/bin/env bash
# Installs bubblewrap from the distribution's packages: code that a model wrote runs inside of it, in tests as in runs.
set -euo pipefail

if command -v bwrap >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "megarl: sandboxes need bubblewrap 0.8 or later. Install the package bubblewrap: sudo apt install bubblewrap, or" >&2
  echo "sudo dnf install bubblewrap" >&2
  exit 2
fi
echo "== installing bubblewrap, once"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends bubblewrap >/dev/null
