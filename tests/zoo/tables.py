"""How every transformers configuration is made small, as data: the rules that hold for all."""

HIDDEN, HEADS, HEAD_DIM, VOCAB, IMAGE, LENGTH = 32, 4, 8, 128, 32, 16

MAPPINGS = (
    "SEQ_TO_SEQ_CAUSAL_LM IMAGE_TEXT_TO_TEXT SPEECH_SEQ_2_SEQ MASKED_LM CAUSAL_LM "
    "ZERO_SHOT_IMAGE_CLASSIFICATION IMAGE_CLASSIFICATION AUDIO_CLASSIFICATION VIDEO_CLASSIFICATION CTC "
    "QUESTION_ANSWERING PRETRAINING OBJECT_DETECTION ZERO_SHOT_OBJECT_DETECTION UNIVERSAL_SEGMENTATION "
    "SEMANTIC_SEGMENTATION DEPTH_ESTIMATION TIME_SERIES_PREDICTION RNNT TDT"
)
"""Auto-mappings in the order in which a head is looked for: those with a loss first."""

TOKENS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "image": 120, "video": 121, "audio": 122}
TOKENS |= {"vision_start": 123, "vision_end": 124}
"""Special tokens by the stem of the field's name; the others are drawn from 100 to 119."""

SIZES: tuple[tuple[str, int, tuple[int, ...]], ...] = (
    (r"type_vocab_sizes?|mem_len|.*num_labels|max_2d_position_embeddings", 1024, (1024,)),
    (r".*vocab.*|.*codebook_size|num_embeddings|num_(bpe|wordpiece)_labels", VOCAB, (VOCAB,)),
    (r"(.*_)?(num|n)_((local|routed|shared)_)?experts|.*expert_num", 4, (4,)),
    (r"num_experts_per_tok.*|moe_(topk|k|top_k)|top_k(_experts)?|experts_per_token|index_topk", 2, (2,)),
    (r"(n|num)_(expert_)?groups?|topk_group", 1, (1,)),
    (r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers", 1, (1,)),
    (r".*num_(key_value|kv)_(attention_)?heads.*|n_head_kv", HEADS // 2, (2,)),
    (r"(.*_)?n?_?heads?|.*num.*_heads(_per_stage)?", HEADS, (2,)),
    (r".*(head_dim|headdim|dim_head|head_size|d_kv|d_head|key_length)|rotary_dim", HEAD_DIM, (HEAD_DIM,)),
    (r".*_rank|.*lowrank", 16, (16,)),
    (r".*layers|n_layers?|.*_depth|depth", 2, (2,)),
    (r"depths|num_blocks|.*block_repeats|layers|.*per_(stage|block)|stage_num.*", 2, (1,)),
    (
        r".*(intermediate|ffn|ffn_hidden|ff|mlp|expert|feed_forward)_(size|dim)|d_ff|d_inner"
        r"|n_inner|dim_ff|dim_feedforward|.*shared.*_size|.*linear_units",
        64,
        (64,),
    ),
    (r"max_.*position.*|n_positions|n_ctx|max_seq_len(gth)?|.*max_length", 128, (128,)),
    (r".*image_size|.*img_size|input_size", IMAGE, (IMAGE,)),
    (r"(.*_)?patch_size", 8, (8,)),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed(ding)?_(dim|size)|hidden_dim(ension)?|dim|width"
        r"|output_size|units|proj(ection)?_size|hidden_channels|bottleneck_size|num_filters"
        r"|upsample_groups|upsample_initial_channel|hidden|d_latents|input_channels|in_channels"
        r"|conv_channels|predictor_channels|input_size|flow_size)",
        HIDDEN,
        (16, 32, 32, 32),
    ),
    (r"(.*_)?(hidden_sizes|embed_dims|channels|hidden_dims|dims)", HIDDEN, (16, 32, 32, 32)),
    (r"num_(queries|registers|register_tokens|latents|query_tokens|quantizers)|n_codebooks", 8, (8,)),
    (r"window_size", 2, (2,)),
    (r"sliding_window|.*_window_size|attention_window|.*chunk_size|block_size|.*chunk_length", 8, (8,)),
)
"""(pattern of the whole field name, ceiling of an int, ceilings of a list, the last repeated)."""
