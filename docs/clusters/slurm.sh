#!/usr/bin/env bash
# One node for the head and the learner, the others for actors. Change what is between the lines of = below.
# ======================================================================================================================
#SBATCH --job-name=unirl
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=unirl-%j.txt
TRAIN=${TRAIN:-"impala --env.id ALE/Pong-v5 --actor.num-actors 32 --queue.batch-size 32 --run.total-steps 200_000_000"}
RUNS=${RUNS:-$SLURM_SUBMIT_DIR/runs}
VENV=${VENV:-$HOME/unirl-venv}
# ======================================================================================================================
set -euo pipefail
. "$VENV/bin/activate"

# srun hands the environment to all nodes; the token is in no argument and no file.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname -I | cut -d' ' -f1)
# Several jobs may share a node: a port of this job's own.
port=$((20000 + SLURM_JOB_ID % 20000))

srun --overlap --nodes=1 --ntasks=1 -w "$head" \
    ray start --head --block --node-ip-address "$address" --port "$port" --dashboard-host 127.0.0.1 \
    --num-cpus 0 & # the learner's: no CPU of it is for actors
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 -w "$node" \
        ray start --block --address "$address:$port" --num-cpus "$SLURM_CPUS_PER_TASK" &
done
for _ in $(seq 60); do
    ray status --address "$address:$port" > /dev/null 2>&1 && break
    sleep 2
done

name=${NAME:-slurm-$SLURM_JOB_ID}
if [ -e "$RUNS/$name/checkpoints/latest" ]; then
    command=(resume "$RUNS/$name")
else
    # shellcheck disable=SC2206  # words, as they were written above
    command=(train $TRAIN --name "$name" --runs-dir "$RUNS")
fi
# Slurm's TERM, five minutes before the end, is passed on: the run writes a checkpoint and ends. NAME=... sbatch slurm.sh
# then continues it.
srun --overlap --nodes=1 --ntasks=1 -w "$head" \
    unirl "${command[@]}" --runner.kind ray --ray.address "$address:$port" --no-console &
train=$!
trap 'kill -TERM "$train"' TERM
wait "$train" || wait "$train"
