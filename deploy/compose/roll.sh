#!/bin/sh
# Replaces every container of a service without a client noticing: an upgrade, or changed settings.
# usage: roll.sh SERVICE [docker compose's options, as -f FILE ...]
#
# Engines: as many new ones beside the old, and once they are ready the old ones one by one; each drains, and its streams
# end or go on on another. That needs room for twice as many; where there is none (GPUs), give the kind two engines and
# recreate one at a time. kvd is alone on its sockets: it drains and starts again, prompts are computed at decode
# meanwhile. The proxy is what clients are connected to: it is not rolled.
set -eu
service=${1:?usage: roll.sh SERVICE [-f FILE ...]}
shift
[ $# -gt 0 ] || set -- -f "$(dirname "$0")/compose.yaml"
compose=${COMPOSE:-docker compose}
# shellcheck disable=SC2086  # two words, or one
case $service in
  kvd)
    $compose "$@" up --detach --no-deps --force-recreate --wait kvd
    ;;
  prefill | decode)
    old=$($compose "$@" ps --quiet "$service")
    count=$(printf '%s\n' "$old" | wc -w)
    [ "$count" -gt 0 ] || { echo "roll.sh: no $service runs" >&2; exit 1; }
    $compose "$@" up --detach --no-deps --no-recreate --scale "$service=$((2 * count))" --wait "$service"
    for container in $old; do
      docker stop "$container" >/dev/null # waits for its drain; the grace is the container's own
      docker rm "$container" >/dev/null
    done
    ;;
  *)
    echo "roll.sh: prefill, decode or kvd, not $service" >&2
    exit 2
    ;;
esac
