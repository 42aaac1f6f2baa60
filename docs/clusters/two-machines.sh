#!/usr/bin/env bash
# Two machines, or more: bash two-machines.sh HEAD WORKER [WORKER ...], from a machine that reaches all of them by ssh
# without a password. HEAD runs the learner. The environment VENV and the folder WORK are at the same place on all.
set -euo pipefail

VENV=${VENV:-$HOME/unirl-venv}
WORK=${WORK:-$HOME/unirl-work}
PORT=${PORT:-6379}
TRAIN=${TRAIN:-"impala --env.id ALE/Pong-v5 --actor.num-actors 16 --queue.batch-size 16"}

[ $# -ge 2 ] || { echo "usage: bash two-machines.sh HEAD WORKER [WORKER ...]" >&2; exit 2; }
head=$1
shift
address=$(ssh "$head" hostname -I | cut -d' ' -f1)
token=$(python3 -c 'import secrets; print(secrets.token_hex(32))')

# The token travels on standard input: in an argument everybody on the machine could read it.
on() {
    { printf '%s\n' "$token"; } | ssh "$1" "read -r RAY_AUTH_TOKEN; export RAY_AUTH_TOKEN RAY_AUTH_MODE=token; \
        . $VENV/bin/activate; cd $WORK; $2"
}

stop() {
    for machine in "$head" "${workers[@]}"; do
        # Not `ray stop`: it would end other people's clusters on these machines.
        ssh "$machine" "[ ! -f $WORK/ray.pid ] || kill \$(cat $WORK/ray.pid); rm -f $WORK/ray.pid" || true
    done
}
workers=("$@")
trap stop EXIT

# --block keeps `ray start` in the foreground, so that its process id ends all it started.
on "$head" "nohup ray start --head --block --node-ip-address $address --port $PORT --dashboard-host 127.0.0.1 \
    > ray.txt 2>&1 < /dev/null & echo \$! > ray.pid"
for machine in "${workers[@]}"; do
    on "$machine" "nohup ray start --block --address $address:$PORT \
        > ray.txt 2>&1 < /dev/null & echo \$! > ray.pid"
done

# Until all have joined, one minute at most.
for _ in $(seq 30); do
    joined=$(on "$head" "ray status --address $address:$PORT" 2> /dev/null | grep -c ' node_' || true)
    [ "$joined" -gt "${#workers[@]}" ] && break
    sleep 2
done
on "$head" "unirl doctor --ray.address $address:$PORT" || echo "see above: something would hold a run back" >&2
on "$head" "unirl train $TRAIN --runner.kind ray --ray.address $address:$PORT"
