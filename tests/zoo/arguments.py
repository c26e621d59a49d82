"""Where the signature of a forward does not say what it takes: arguments by model."""

from collections.abc import Callable
from typing import Any

import torch

_TIME = {
    "past_values": (2, 10),
    "past_time_features": (2, 10, 0),
    "past_observed_mask": lambda d: d.ones(2, 10),
    "future_values": (2, 4),
    "future_time_features": (2, 4, 0),
}
_WAVE = {"input_values": (2, 1, 800)}
_VIDEO = {"pixel_values": (2, 2, 3, 32, 32)}

COMMON: dict[str, Callable[[Any], Any]] = {
    "input_ids decoder_input_ids classes_input_ids tasks_input_ids task_inputs": lambda d: d.ids(),
    "qformer_input_ids": lambda d: d.ids(4),
    "return_loss": lambda d: d.tensor(True),
    "bbox": lambda d: d.bbox(),
    "start_positions end_positions": lambda d: d.tensor([1, 2]),
    "labels": lambda d: d.labels(),
    "pixel_values": lambda d: d.pixel_values(),
    "pixel_values_videos": lambda d: d.pixel_values_videos(),
    "hidden_states": lambda d: d.patches().flatten(1),
    "grid_thw image_grid_thw": lambda d: d.grid(),
    "input_values": lambda d: d.normal(2, 4000),
    "input_features": lambda d: d.input_features(),
    "input_features_mask": lambda d: d.ones(2, d.made["input_features"].shape[1]),
}
"""Makers of arguments that many models take, called with a `batches.Draw`."""

INPUTS: dict[str, dict[str, Any]] = {
    "aimv2 bridgetower vilt layoutlmv3": {"pixel_values": lambda d: d.pixel_values()},
    "audio-spectrogram-transformer": {"input_values": (2, 32, 32)},
    "audioflamingo3_encoder": {"input_features_mask": lambda d: d.ones(2, 256)},
    "autoformer informer time_series_transformer": _TIME,
    "blip-2 instructblip": {"labels": lambda d: d.made["input_ids"].clone()},
    "blip_2_qformer": {"query_embeds": (2, 8, 32), "input_ids": None, "encoder_hidden_states": (2, 4, 32)},
    "cosmos3_edge_vision": {"pixel_values": (32, 192)},
    "csm": {"input_ids": lambda d: d.ids(4), "labels": None},
    "dac encodec mimi mimi_encoder pe_audio pe_audio_encoder pocket_tts_audio_tokenizer"
    " pocket_tts_audio_tokenizer_encoder vibevoice_acoustic_tokenizer": _WAVE,
    "decision_transformer": {
        "states": (2, 4, 17),
        "actions": (2, 4, 4),
        "rewards": (2, 4, 1),
        "returns_to_go": (2, 4, 1),
        "timesteps": lambda d: d.integers(2, 4, low=0, high=8),
        "attention_mask": lambda d: d.ones(2, 4),
    },
    "dia": {"labels": None, "decoder_input_ids": lambda d: d.integers(2, 8, 9)},
    "encoder-decoder": {"labels": None, "decoder_input_ids": lambda d: d.ids()},
    "fun_asr_nano_encoder": {"input_features": (2, 64, 560), "input_features_mask": lambda d: d.ones(2, 64)},
    "gemma3n_audio": {"audio_mel": (2, 64, 128), "audio_mel_mask": lambda d: d.ones(2, 64) > 2},
    "git": {"labels": lambda d: d.made["input_ids"].clone(), "pixel_values": lambda d: d.pixel_values()},
    "glmasr_encoder": {"input_features": (2, 128, 256)},
    "granite_speech5_ctc": {"input_features": (2, 64, 320), "attention_mask": lambda d: d.ones(2, 64)},
    "granite_speech5_encoder": {"input_features": (2, 64, 320)},
    "idefics": {"pixel_values": (2, 1, 3, 32, 32), "image_attention_mask": lambda d: d.ones(2, 16, 1)},
    "kosmos-2": {
        "pixel_values": lambda d: d.pixel_values(),
        "image_embeds_position_mask": lambda d: (torch.arange(16) < 4).long().expand(2, 16),
    },
    "lxmert": {"visual_feats": (2, 4, 16), "visual_pos": (2, 4, 4), "labels": None},
    "mimi_decoder pocket_tts_audio_tokenizer_decoder": {"latents": (2, 32, 8)},
    "muse_glimmer_vision muse_spark_vision lfm3_vl_vision": {"pixel_values": (32, 384)},
    "muse_spark_audio": {"input_values": (2, 1920)},
    "musicgen musicgen_melody": {"decoder_input_ids": lambda d: d.ids(8).repeat(4, 1), "labels": None},
    "parakeet_ctc lasr_ctc": {"attention_mask": lambda d: d.ones(2, 64)},
    "patchtst patchtsmixer": {"past_values": (2, 32, 1)},
    "perceiver": {"input_ids": None, "labels": lambda d: d.ids(128), "inputs": lambda d: d.ids(128)},
    "pix2struct": {
        "flattened_patches": lambda d: torch.cat([d.integers(2, 8, 2, low=0, high=4), d.normal(2, 8, 32)], -1)
    },
    "siglip2 siglip2_vision_model": {
        "pixel_values": (2, 16, 192),
        "pixel_attention_mask": lambda d: d.ones(2, 16),
        "spatial_shapes": lambda d: d.tensor([[4, 4]] * 2),
    },
    "speech-encoder-decoder": {"inputs": None, "input_values": (2, 4000)},
    "timesfm": {
        "past_values": (2, 64),
        "past_values_padding": lambda d: d.ones(2, 64) * 0,
        "freq": lambda d: d.tensor([[0], [1]]),
    },
    "timesfm2_5": {"past_values": (2, 64)},
    "timesformer videomae vivit xclip": _VIDEO,
    "udop": {"bbox": lambda d: d.normal(2, 16, 4).sigmoid()},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": (2, 32, 8)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": (2, 1, 800)},
    "video_llama_3_vision": {"merge_sizes": lambda d: d.tensor([2, 2])},
    "visual_bert": {
        "visual_embeds": (2, 4, 16),
        "visual_attention_mask": lambda d: d.ones(2, 4),
        "attention_mask": lambda d: d.ones(2, 16),
        "labels": lambda d: d.ids(20),
    },
    "voxtral_realtime_encoder": {"input_features": (2, 128, 64)},
    "wav2vec2-bert": {"input_features": (2, 64, 160)},
}
"""Makers of arguments by model, or shapes of normally distributed ones; None leaves the argument out."""

IMAGES: dict[str, tuple[str, int]] = {
    "aya_vision cohere2_vision gemma3 internvl qianfan_ocr shieldgemma2 t5gemma2": ("image", 4),
    "blip-2 instructblip": ("image", 8),
    "cohere_compass cosmos3_edge cosmos3_omni exaone4_5 glm46v glm4v glm4v_moe glm_ocr glmga"
    " hyperclovax_vision_v2 lfm3_vl minimax_m3_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5"
    " qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp": ("grid", 4),
    "florence2": ("image", 2),
    "got_ocr2 pp_chart2table": ("image", 1),
    "idefics2": ("tiles", 64),
    "idefics3 smolvlm": ("tiles", 4),
    "lighton_ocr mistral3 mistral_large4": ("sizes", 4),
    "llava ovis2 paligemma vipllava": ("image", 16),
    "paddleocr_vl": ("patches", 4),
    "unlimited_ocr": ("image", 3),
}
"""(layout of the pixels, tokens per image) of models that splice image features into text."""
