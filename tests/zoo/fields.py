"""Where the size rules of `tables` are not enough: fields by configuration, heads by model."""

from typing import Any


def _rope(*sections: int, **options: float) -> dict[str, Any]:
    """Rotary positions in sections of this many pairs."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return {"rope_parameters": rope | options}


_MROPE = _rope(2, 1, 1)
_HYBRID = ["linear_attention", "hybrid", "hybrid"]
_RESNET = {"model_type": "resnet", "out_features": ["stage1", "stage2", "stage3", "stage4"]}
_CODEC = {"upsampling_ratios": [4, 2], "num_filters": 8}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "label_length": 4}
_CHANNELS = {"encoder_in_channels": [32, 32, 32], "decoder_in_channels": [32, 32, 32]}

FIELDS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 32},
    "autoformer informer time_series_transformer": _SERIES,
    "bit": {"embedding_size": 16, "num_groups": 4},
    "blip-2 instructblip": {"image_token_index": 120},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "blt_local_encoder blt_local_decoder": {"hidden_size_global": 32},
    "bridgetower bridgetower_text_model bridgetower_vision_model": {
        "hidden_size": 64,
        "num_attention_heads": 1,
    },
    "bros": {"hidden_size": 64, "num_attention_heads": 2},
    "chameleon emu3": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 119}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _MROPE["rope_parameters"]}},
    "conditional_detr dab-detr deformable_detr detr table-transformer": {"backbone_config": _RESNET},
    "cosmos3_edge_text glm4v_text glm_image_text glm_ocr_text paddleocr_vl_text"
    " qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text": _MROPE,
    "cvt": {"depth": [1, 2, 3]},
    "d_fine deimv2 pp_doclayout_v4 rt_detr rt_detr_v2": _CHANNELS,
    "dac": {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4]},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dinov3_convnext": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "dinov3_vit": {"pos_embed_rescale": None},
    "donut-swin maskformer-swin swin swinv2": {"patch_size": 2, "embed_dim": 16},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": {"per_layer_config": None},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "emu3_vqgan": {"channel_multiplier": [1, 1]},
    "encodec": _CODEC,
    "ernie4_5_vl_moe_text": {**_rope(1, 1, 2), "moe_intermediate_size": [32, 32]},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 3},
    "evolla": {
        "protein_encoder_config": {
            "vocab_size": 128,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        }
    },
    "exaone4_5_vision qwen2_5_vl_vision qwen2_5_omni_vision_encoder": {"window_size": 32},
    "fastspeech2_conformer_hifigan": {
        "model_in_dim": 80,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "gemma3 shieldgemma2 t5gemma2 t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
    },
    "glm4v_moe_text": _rope(1, 1, 0, partial_rotary_factor=0.5),
    "glm5_next_text": {"index_topk": 32, "index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech granite_speech_plus": {"window_size": 10},
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 16, 32, 32],
        "stage_mid_channels": [16, 16, 16, 16],
    },
    "hunyuan_v1_dense hunyuan_v1_moe ministral": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8, **_MROPE},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "embed_dim": 8},
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "kosmos-2": {"latent_query_num": 4},
    "lasr_encoder": {"conv_kernel_size": 7},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "levit": {"drop_path_rate": 0, "patch_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "lxmert": {"visual_feat_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mimi mimi_decoder mimi_encoder": {**_CODEC, "upsample_groups": 32, "hidden_size": 32},
    "mobilebert": {"embedding_size": 16},
    "mobilenet_v1 mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevitv2": {"width_multiplier": 0.25, "image_size": 64},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "moonshine": {"pad_token_id": 0},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_self_attends_per_block": 2, "d_model": 32, "d_latents": 32, "train_size": [32, 32]},
    "qwen3_asr_encoder": {"n_window": 16},
    "sam_vision_model sam_hq_vision_model": {"num_pos_feats": 16, "global_attn_indexes": [1]},
    "siglip2_vision_model": {"num_patches": 16},
    "step3p5": {"sliding_window": 8},
    "textnet": {"hidden_sizes": [32, 32, 32, 32, 32], "stem_out_channels": 32},
    "timesformer": {"drop_path_rate": 0, "num_frames": 2},
    "univnet": {
        "resblock_kernel_sizes": [3],
        "resblock_stride_sizes": [4],
        "resblock_dilation_sizes": [[1, 3]],
    },
    "vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder"
    " vibevoice_acoustic_tokenizer_encoder": {"depths": [1, 1], "downsampling_ratios": [2], "num_filters": 8},
    "videomae xclip_vision_model": {"num_frames": 2},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "visual_bert": {"visual_embedding_dim": 16},
    "vivit": {"num_frames": 2, "tubelet_size": [2, 8, 8]},
    "wav2vec2-bert": {"feature_projection_input_dim": 160},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": _HYBRID, "num_hidden_layers": 3},
    "zamba2": {
        "layers_block_type": _HYBRID,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
    },
}
"""Fields by the model types of configuration classes, nested ones included."""

CLASSES = {
    "dpt": "DPTModel",
    "mask2former": "Mask2FormerModel",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "sapiens2": "Sapiens2Model",
    "timesfm": "TimesFmModel",
}
"""Heads that fit a model type's own configuration better than the auto-mapping's."""
