#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --signal=TERM@120 --requeue --open-mode=append
srun --kill-on-bad-exit=0 jaxgpt train gpt2 --out /shared/runs/gpt2 --data.path /shared/fineweb \
    --train.batch-size 512 --resume
code=$?
[ $code = 75 ] && scontrol requeue $SLURM_JOB_ID
exit $code
