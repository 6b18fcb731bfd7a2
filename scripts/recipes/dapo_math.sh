#!/usr/bin/env bash
# DAPO on DAPO-Math-17k with Qwen2.5-Math-7B, tested on AIME 2024 as avg@32: 4 GPUs train and 4 generate.
# The algorithm's values are those of the DAPO paper and of verl's script for 4 + 4 GPUs.
#
#   scripts/recipes/dapo_math.sh
#   scripts/recipes/dapo_math.sh rollout.max_staleness=1      one step off; any override may follow
#   scripts/recipes/dapo_math.sh model=tiny                   two CPU cores, no download of a model
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_data dapo_math train
need_data aime_2024 test

sizes=(
  model.path=Qwen/Qwen2.5-Math-7B
  algorithm.overlong_buffer_tokens=4096
  rollout.num_replicas=4
  rollout.max_num_seqs=128
  rollout.max_response_tokens=8192
  trainer.num_ranks=4
  trainer.lr=1e-6
  trainer.tokens_per_micro_batch=20480
)
if has_own_sizes "$@"; then sizes=(); fi

exec "$python" -m scripts.train \
  recipe=dapo_math \
  data.train_files="$DATA/dapo_math/train.parquet" \
  data.val_files="$DATA/aime_2024/test.parquet" \
  algorithm.group_size=16 \
  algorithm.filter_groups=true \
  algorithm.loss_aggregation=token_mean \
  algorithm.clip_ratio_low=0.2 \
  algorithm.clip_ratio_high=0.28 \
  rollout.reward=dapo \
  rollout.max_staleness=4 \
  trainer.total_steps=6400 \
  trainer.prompts_per_step=32 \
  trainer.eval_every=320 \
  evaluation.samples=32 \
  evaluation.temperature=1.0 \
  evaluation.top_p=0.7 \
  ${sizes[@]+"${sizes[@]}"} \
  "$@"
