#!/usr/bin/env bash
# REINFORCE++-baseline of Qwen3 (8 samples a prompt, the divergence in the loss) on multi-turn episodes with OpenRLHF 0.11.
#
#   TASKS=tasks.jsonl ./reinforce-plus-plus-baseline-qwen3.sh [more OpenRLHF flags]
#
# TASKS: one row a line, {"input": "<a task as JSON text>"}, such as {"input": "{\"id\": \"shop-3\", \"data\": {\"idx\": 3}}"};
# it is not rendered (no --data.apply_chat_template), because the environment opens the conversation.
# CONFIG: the [rl] section that says which environment, strategy and limits.
# Needs 8 GPUs as it stands; an environment of its own: pip install "openrlhf[vllm]==0.11.2" ".[train]" in a clone
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
export OPENHANDS_RL_CONFIG=${CONFIG:-$here/webshop.toml}
agent=$("$python" -c 'import importlib.util as u; print(u.find_spec("openhands_rl_plugin.training").submodule_search_locations[0] + "/openrlhf/agent.py")')

exec "$python" -m openrlhf.cli.train_ppo_ray \
  --actor.model_name_or_path "${MODEL:-Qwen/Qwen3-4B-Instruct-2507}" \
  --train.agent_func_path "$agent" \
  --data.prompt_dataset "${TASKS:?a file of tasks, see above}" \
  --data.input_key input \
  --data.max_len 8192 \
  --algo.advantage.estimator reinforce_baseline \
  --rollout.n_samples_per_prompt 8 \
  --algo.dynamic_filtering_enable \
  --algo.dynamic_filtering_range 0.0 1.0 \
  --algo.kl.use_loss \
  --algo.kl.init_coef 1e-5 \
  --algo.kl.estimator k2 \
  --actor.eps_clip_low_high 0.2 0.28 \
  --actor.adam.lr 5e-7 \
  --actor.gradient_checkpointing_enable \
  --algo.advantage.is_correction_level token \
  --algo.advantage.is_correction_mode mask \
  --algo.advantage.is_correction_threshold 0.5 5.0 \
  --rollout.batch_size 128 \
  --rollout.temperature 1.0 \
  --train.batch_size 1024 \
  --train.micro_batch_size 1 \
  --rollout.micro_batch_size 4 \
  --train.num_episodes 4 \
  --ds.zero_stage 3 \
  --ds.param_dtype bf16 \
  --ds.packing_samples \
  --actor.num_nodes 1 \
  --actor.num_gpus_per_node 8 \
  --ref.num_nodes 1 \
  --ref.num_gpus_per_node 8 \
  --train.colocate_all \
  --vllm.num_engines 8 \
  --vllm.tensor_parallel_size 1 \
  --vllm.gpu_memory_utilization 0.6 \
  --vllm.enable_prefix_caching \
  --vllm.enable_sleep \
  --ds.enable_sleep \
  --ckpt.output_dir "${OUTPUT:-./openrlhf-policy}" \
  --ckpt.save_steps 20 \
  --logger.logging_steps 1 \
  "$@"
