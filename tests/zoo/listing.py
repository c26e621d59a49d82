"""Which model types of transformers 5.23 do not build at toy size, and why."""

REASONS: dict[str, str] = {
    "forward wants an inference session": "edgetam_video sam2_video sam3_tracker_video sam3_video",
    "its validator ties sizes that the shrink rules do not know": (
        "depth_pro dots3_note efficientloftr gemma4_assistant gemma4_unified_assistant nemo_speechlm "
        "nemotron3_5_transcribe_audio nemotron3_diarization"
    ),
    "loss is nan at toy size": "align",
    "needs detectron2": "layoutlmv2",
    "needs natten": "dinat",
    "needs scipy": "eomt eomt_dinov3 inkling_mm_model maskformer oneformer videomt",
    "needs timm": (
        "fast_vlm gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder "
        "perception_lm timm_backbone timm_wrapper"
    ),
    "needs torchaudio": "higgs_audio_v2_tokenizer",
    "no forward of its own": "bark glm_image_vqmodel",
    "over 2 M parameters: widths are fixed in its code or sub-configurations": (
        "deepseek_ocr2 neucodec pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv6_small_det uvdoc xcodec2"
    ),
    "refuses a backward in eval mode": "reformer",
    "sizes fixed in code disagree with a toy image or width": (
        "clap clvp edgetam edgetam_vision_model gemma4_audio granite4_vision kimi_k25_vision lightglue "
        "pp_doclayout_v2 pp_doclayout_v3 pp_ocrv5_server_det pp_ocrv5_server_rec pp_ocrv6_medium_det "
        "pp_ocrv6_small_rec pp_ocrv6_tiny_rec sam2 sam2_hiera_det_model sam2_vision_model sam3_tracker tvp"
    ),
    "taps a third layer": "chmv2 depth_anything lw_detr prompt_depth_anything tipsv2_dpt zoedepth",
    "training is not implemented": "vits",
    "transducer: wants decoder inputs": "nemotron3_5_asr nemotron_asr_streaming parakeet_rnnt parakeet_tdt",
    "upstream: the auto-mapping names a class or a type that does not exist": "rf_detr voxtral_realtime_text",
    "upstream: the configuration lacks a field that the model reads": "t5gemma2_encoder",
    "wants inputs that only its processor makes": (
        "flava gemma4_vision hunyuan_vl_vision inkling2_vision instructblipvideo kyutai_speech_to_text "
        "minicpm_ocr_vision minicpmv4_7_vision muse_glimmer_assistant nemotron3_5_transcribe_word_timestamp "
        "omdet-turbo pi0 qwen3_asr_encoder seggpt voxtral_realtime xcodec"
    ),
}
"""Model types of the auto-mappings that are left out, by the reason."""
