"""Usual spellings of parameters and flags. Spelling breaks a tie between parameters of one shape."""

from __future__ import annotations

import re

PARAMETERS = {
    "tok_embeddings": "embed_tokens wte tok_emb tok_embed token_emb token_embedding token_embeddings embed embedding emb",
    "output": "lm_head head unembed readout to_logits out_head vocab_head",
    "attention": "attn self_attn self_attention mixer att sa mha",
    "feed_forward": "mlp ff ffn feedforward swiglu",
    "attention_norm": "input_layernorm ln_1 ln1 n1 norm1 norm_1 attn_norm pre_attn_norm norm_attn ln_attn pre_attn",
    "ffn_norm": "post_attention_layernorm ln_2 ln2 n2 norm2 norm_2 mlp_norm ff_norm pre_mlp_norm norm_mlp ln_mlp pre_mlp",
    "wq": "q_proj query to_q q q_lin query_proj proj_q",
    "wk": "k_proj key to_k k k_lin key_proj proj_k",
    "wv": "v_proj value to_v v v_lin value_proj proj_v",
    "wo": "o_proj out_proj to_out o out proj_o proj_out",
    "w1": "gate_proj gate w_gate fc_gate",
    "w2": "down_proj down w_down fc_down",
    "w3": "up_proj up w_up fc_up",
    "weight": "scale gamma gain g",
}
FUSED = {
    "wq wk wv": "qkv wqkv c_attn qkv_proj proj_qkv to_qkv w_qkv attn_qkv query_key_value in_proj",
    "wk wv": "kv wkv kv_proj proj_kv to_kv w_kv c_kv key_value",
    "w1 w3": "gate_up gate_up_proj up_gate w13 w1_w3 fc_gate_up w_gate_up gu",
}
FLAGS = {
    "training.steps": "steps max_steps total_steps train_steps iters max_iters",
    "training.lr": "lr learning_rate max_lr peak_lr base_lr",
    "training.warmup_steps": "warmup warmup_steps warmup_iters lr_warmup_steps",
    "training.lr * case.training.final_lr_fraction": "min_lr lr_min final_lr end_lr",
    "training.final_lr_fraction": "min_lr_ratio min_lr_frac min_lr_fraction final_lr_fraction lr_min_ratio min_ratio lr_floor",
    "training.weight_decay": "weight_decay wd",
    "training.beta1": "beta1 adam_beta1",
    "training.beta2": "beta2 adam_beta2",
    "training.eps": "eps adam_eps",
    "training.max_norm or 0.0": "clip grad_clip max_norm max_grad_norm clip_grad clip_norm gradient_clip grad_clip_norm",
    "training.global_batch": "global_batch global_batch_size global_bs gbs tokens_global_batch",
    "local_batch": "batch_size micro_batch micro_batch_size mbs micro_bs local_batch local_batch_size batch bs bsz"
    " device_batch device_batch_size",
    "features.accumulation": "accum grad_accum accumulation gradient_accumulation_steps grad_accum_steps accum_steps",
    "training.seq_len": "seq_len seq block_size context_length context max_seq_len seqlen ctx ctx_len seq_length length",
    "training.dtype": "dtype precision param_dtype",
    "training.seed": "seed",
    "model.dim": "dim d d_model hidden_size n_embd hidden width embed_dim",
    "model.n_layers": "n_layers n_layer layers depth num_hidden_layers nlayers nlayer",
    "model.n_heads": "n_heads heads n_head num_attention_heads nheads nhead",
    "model.n_kv_heads": "n_kv_heads kv_heads n_kv num_key_value_heads n_kv_head kv",
    "model.vocab_size": "vocab_size vocab n_vocab",
    "model.ffn_dim": "ffn_dim ffn hidden_dim intermediate_size d_ff mlp_dim ffn_hidden ffn_hidden_size inner_dim d_ffn",
    "model.rope_theta": "rope_theta theta rope_base rotary_base",
    "model.norm_eps": "norm_eps rms_eps rms_norm_eps",
    "dims.dp_replicate": "dp_replicate replicate dp_rep replicas ddp",
    "dims.dp_shard": "dp_shard shard shards fsdp",
    "dims.tp": "tp tensor_parallel model_parallel mp",
    "features.compile": "compile",
    "features.loss_parallel": "loss_parallel",
    "features.async_tp": "async_tp",
    "device": "device",
    "resume": "resume resume_from resume_path load_from load_checkpoint init_from_checkpoint",
    "save_to": "save_to save_dir checkpoint_dir ckpt_dir checkpoint_path checkpoints save_path out_dir output_dir",
    "saved_step": "stop_after stop_at save_every save_interval checkpoint_interval ckpt_interval checkpoint_every save_freq",
}
AFFIXES = r"^(n|num|data_parallel)_|_(size|degree)$"


def names_by_spelling(table: dict[str, str]) -> dict[str, str]:
    """Return our name by each of its spellings, itself included. table: spellings, separated by spaces, by our name."""
    ours_by_spelling = {}
    for ours, spellings in table.items():
        for theirs in (*spellings.split(), ours):
            ours_by_spelling[theirs] = ours
    return ours_by_spelling


NAMES_BY_SPELLING = names_by_spelling(PARAMETERS)
FUSED_BY_SPELLING = names_by_spelling(FUSED)
OF_FLAGS = names_by_spelling(FLAGS)


def flag_expression(flag: str) -> str:
    """Return the expression of a case that a flag is spelled like. Empty if there is none."""
    word = flag.lstrip("-").replace("-", "_").lower()
    return OF_FLAGS.get(word) or OF_FLAGS.get(re.sub(AFFIXES, "", word), "")
