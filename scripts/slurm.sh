#!/usr/bin/env bash
# A sweep on Slurm whose launching process is a job too: it submits the array, waits, and writes the closing table.
#
#   sbatch scripts/slurm.sh experiment=lr_grid hydra.launcher.workers=16 hydra.launcher.gpus=0.25
#
# Preempted or out of time, it is queued again and goes on: every finished run is kept. From a login node that lets
# processes live, `qkexp sweep hydra/launcher=submitit_slurm …` does without this file.
#SBATCH --job-name=qkexp
#SBATCH --time=24:00:00
#SBATCH --cpus-per-task=1
#SBATCH --mem=4G
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
set -uo pipefail
source .venv/bin/activate
arguments=(hydra/launcher=submitit_slurm hydra.launcher.timeout_min=240 "$@")
qkexp sweep "${arguments[@]}" &
child=$!
trap 'kill -USR1 $child' USR1 TERM
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done  # the first wait ends when a signal comes
if [ $code -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # 75: interrupted, the same command goes on
exit $code
