#!/usr/bin/env bash
# Search-R1 on NQ and HotpotQA with Qwen2.5-3B-Instruct: 4 GPUs train and 4 generate, at most 8 versions apart.
# The values are those of SkyRL's fully asynchronous script. A retriever answers at 127.0.0.1:8000.
#
#   scripts/recipes/search_r1.sh
#   scripts/recipes/search_r1.sh rollout.max_staleness=0      synchronous; any override may follow
#   scripts/recipes/search_r1.sh rollout.agent_args.retriever.url=http://other:8000/retrieve
#   scripts/recipes/search_r1.sh model=tiny                   two CPU cores, no download of a model
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

need_data search_r1 train test

sizes=(
  model.path=Qwen/Qwen2.5-3B-Instruct
  rollout.num_replicas=4
  rollout.max_num_seqs=256
  rollout.max_response_tokens=4096
  trainer.num_ranks=4
  trainer.lr=1e-6
  trainer.tokens_per_micro_batch=32768
)
if has_own_sizes "$@"; then sizes=(); fi

exec "$python" -m scripts.train \
  recipe=search_r1 \
  data.train_files="$DATA/search_r1/train.parquet" \
  data.val_files="$DATA/search_r1/test.parquet" \
  rollout.agent_args.topk=3 \
  rollout.agent_args.max_turns=4 \
  algorithm.group_size=5 \
  algorithm.kl_loss_coef=0.001 \
  algorithm.rejection_low=0.99 \
  algorithm.rejection_high=1.01 \
  rollout.max_staleness=8 \
  trainer.total_steps=662 \
  trainer.prompts_per_step=256 \
  ${sizes[@]+"${sizes[@]}"} \
  "$@"
