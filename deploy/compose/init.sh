#!/bin/sh
# Makes what a deployment needs and no repository has, once: .env, and the cluster key that engines sign with.
# Run by a user who is not root, the services run as that user too, who alone can read the key.
set -eu
cd "$(dirname "$0")"
if [ ! -e .env ]; then
  cp .env.example .env
  if [ "$(id -u)" != 0 ]; then
    sed -i "s/^PDSERVE_UID=.*/PDSERVE_UID=$(id -u)/; s/^PDSERVE_GID=.*/PDSERVE_GID=$(id -g)/" .env
  fi
fi
key=secrets/cluster.key
if [ ! -e "$key" ]; then
  (umask 077 && head -c 32 /dev/urandom | base64 >"$key.new")
  if [ "$(id -u)" = 0 ]; then
    uid=$(sed -n 's/^PDSERVE_UID=//p' .env)
    gid=$(sed -n 's/^PDSERVE_GID=//p' .env)
    chown "$uid:$gid" "$key.new"
  fi
  mv "$key.new" "$key"
fi
