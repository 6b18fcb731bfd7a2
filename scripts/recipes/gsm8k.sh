#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-1.5B-Instruct: 2 GPUs train and 2 generate, at most 4 versions apart.
# Comparable with verl's and SkyRL's GSM8K examples.
#
#   scripts/recipes/gsm8k.sh
#   scripts/recipes/gsm8k.sh rollout.max_staleness=0          synchronous; any override may follow
#   scripts/recipes/gsm8k.sh model=tiny data.num_val=64       two CPU cores, no download of a model
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_data gsm8k train test

sizes=(
  model.path=Qwen/Qwen2.5-1.5B-Instruct
  rollout.num_replicas=2
  rollout.max_num_seqs=256
  rollout.max_response_tokens=1024
  trainer.num_ranks=2
  trainer.lr=1e-6
  trainer.tokens_per_micro_batch=16384
)
if has_own_sizes "$@"; then sizes=(); fi

exec "$python" -m scripts.train \
  recipe=gsm8k \
  data.train_files="$DATA/gsm8k/train.parquet" \
  data.val_files="$DATA/gsm8k/test.parquet" \
  algorithm.advantage=grpo \
  algorithm.group_size=8 \
  rollout.reward=gsm8k \
  rollout.max_staleness=4 \
  trainer.total_steps=200 \
  trainer.prompts_per_step=64 \
  trainer.eval_every=10 \
  ${sizes[@]+"${sizes[@]}"} \
  "$@"
