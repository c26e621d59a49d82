"""Which model types build at toy size with transformers 5.23, and which do not, and why."""

_BUILT = (
    "afmoe aimv2 aimv2_vision_model albert altclip apertus arcee aria aria_text "
    "audio-spectrogram-transformer audioflamingo3 audioflamingo3_encoder autoformer axk1 axk2 "
    "aya_vision bailing_hybrid bamba bart beam beit bert bert-generation big_bird "
    "bigbird_pegasus biogpt bit bitnet blenderbot blenderbot-small blip blip-2 blip_2_qformer "
    "bloom blt bridgetower bros camembert canary canine chameleon chinese_clip "
    "chinese_clip_vision_model clip clip_text_model clip_vision_model clipseg codegen cohere "
    "cohere2 cohere2_moe cohere2_vision cohere_asr cohere_compass cohere_compass_text "
    "cohere_compass_vision colmodernvbert colpali colqwen2 conditional_detr convbert convnext "
    "convnextv2 cosmos3_edge cosmos3_edge_text cosmos3_edge_vision cosmos3_omni cpmant csm "
    "ctrl cvt cwm d_fine dab-detr dac data2vec-audio data2vec-text data2vec-vision dbrx "
    "deberta deberta-v2 decision_transformer deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 "
    "deepseek_vl deepseek_vl_hybrid deformable_detr deimv2 deit detr dia diffllama "
    "diffusion_gemma dinov2 dinov2_with_registers dinov3_convnext dinov3_vit distilbert doge "
    "donut-swin dots1 dots3_note_text dpr dpt efficientnet electra embedding_gemma2 "
    "embedding_gemma2_text emu3 encodec encoder-decoder ernie ernie4_5 ernie4_5_moe "
    "ernie4_5_vl_moe esm esmc eurobert evolla exaone4 exaone4_5 exaone4_5_vision exaone_moe "
    "falcon falcon_h1 falcon_mamba fastspeech2_conformer fastspeech2_conformer_with_hifigan "
    "flaubert flex_olmo flint florence2 fnet focalnet fsmt fun_asr_nano fun_asr_nano_encoder "
    "funnel fuyu gemma gemma2 gemma3 gemma3_text gemma3n_audio gemma3n_text gemma4 "
    "gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm46v glm4_moe "
    "glm4_moe_lite glm4v glm4v_moe glm4v_moe_text glm4v_moe_vision glm4v_text glm4v_vision "
    "glm5_next glm5_next_text glm5_next_vision glm_image glm_image_text glm_image_vision "
    "glm_moe_dsa glm_ocr glm_ocr_text glm_ocr_vision glmasr glmasr_encoder glmga glpn "
    "got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj "
    "gradium_phonon_tts granite granite_docling granite_docling_text granite_docling_vision "
    "granite_speech granite_speech5_ctc granite_speech5_encoder granite_speech_plus "
    "granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared grounding-dino "
    "groupvit gte helium hgnet_v2 hiera higgs_audio_v2 hrm_text hubert hunyuan_v1_dense "
    "hunyuan_v1_moe hunyuan_vl hunyuan_vl_text hy_v3 hy_v4 hyperclovax hyperclovax_vision_v2 "
    "ibert idefics idefics2 idefics3 idefics3_vision ijepa imagegpt informer inkling2 "
    "inkling2_text inkling_text instructblip internlm3 internvl internvl_vision iquestcoder "
    "jais2 jamba janus jetmoe jina_embeddings_v3 kimi_k25 kimi_linear kolibri1 kosmos-2 "
    "kosmos-2.5 laguna lasr_ctc lasr_encoder layoutlm layoutlmv3 led levit lfm2 lfm2_moe "
    "lfm2_vl lfm3 lfm3_vl lfm3_vl_vision lighton_ocr lilt llama llama4 llama4_text llava "
    "llava_next llava_next_video llava_onevision longcat_flash longformer longt5 luke lxmert "
    "m2m_100 mamba mamba2 marian markuplm mask2former maskformer-swin mbart megatron-bert "
    "mellum metaclip_2 mgp-str mimi mimi_decoder mimi_encoder mimo_v2_flash minicpm3 "
    "minicpm_ocr minicpmv4_6 minicpmv4_7 minimax minimax_m2 minimax_m3_vl minimax_m3_vl_text "
    "ministral ministral3 mistral mistral3 mistral4 mistral_large4 mistral_large4_text "
    "mixtral mlcd mlcd_vision_model mllama mm-grounding-dino mobilebert mobilenet_v1 "
    "mobilenet_v2 mobilevit mobilevitv2 modernbert modernbert-decoder modernvbert molmo2 "
    "molmo2_text moonshine moonshine_streaming moshi moss_transcribe_diarize "
    "moss_transcribe_diarize_audio mpnet mpt mra mt5 muse_glimmer muse_glimmer_text "
    "muse_glimmer_vision muse_spark muse_spark_audio muse_spark_text muse_spark_vision "
    "musicflamingo musicgen musicgen_melody mvp nanochat nemotron "
    "nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio "
    "nemotron_asr_streaming_encoder nemotron_h nemotron_h_omni neomme nllb-moe nomic_bert "
    "nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt openai_privacy_filter opt "
    "ovis2 owlv2 owlvit paddleocr_vl paligemma parakeet_ctc parakeet_encoder patchtsmixer "
    "patchtst pe_audio pe_audio_encoder pegasus pegasus_x perceiver persimmon phi phi3 "
    "phi4_multimodal phimoe pix2struct pixio pixtral plbart pocket_tts "
    "pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder "
    "pocket_tts_audio_tokenizer_encoder poolformer pop2piano pp_chart2table pp_doclayout_v4 "
    "pp_formulanet pp_lcnet prophetnet pvt pvt_v2 qianfan_ocr qianfan_ocr_vision qwen2 "
    "qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_5_vl_vision qwen2_audio "
    "qwen2_audio_encoder qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe "
    "qwen3_5_moe_text qwen3_5_moe_vision qwen3_5_text qwen3_5_vision qwen3_asr qwen3_moe "
    "qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text "
    "qwen3_vl_moe_vision qwen3_vl_text qwen3_vl_vision qwen4_exp qwen4_exp_text "
    "qwen4_exp_vision radio recurrent_gemma regnet rembert resnet roberta "
    "roberta-prelayernorm roc_bert roformer rt_detr rt_detr_v2 rwkv sam sam3 sam3_lite_text "
    "sam3_lite_text_text_model sam3_vision_model sam3_vit_model sam_hq sam_hq_vision_model "
    "sam_vision_model sapiens2 seamless_m4t seamless_m4t_v2 seed_oss segformer sew sew-d "
    "shieldgemma2 siglip siglip2 siglip2_vision_model siglip_vision_model smollm3 smolvlm "
    "smolvlm_vision solar_open speech-encoder-decoder speech_to_text speecht5 splinter "
    "squeezebert stablelm starcoder2 step3p7 swiftformer swin swin2sr swinv2 "
    "switch_transformers t5 t5gemma t5gemma2 table-transformer tapas textnet "
    "time_series_transformer timesfm timesfm2_5 timesformer tipsv2 tipsv2_text_model "
    "tipsv2_vision_model trocr udop ultrabert ultravbert umt5 unispeech unispeech-sat univnet "
    "unlimited_ocr upernet vaultgemma vibevoice vibevoice_acoustic_tokenizer "
    "vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder vibevoice_asr "
    "video_llama_3 video_llama_3_vision video_llava videomae videoprism "
    "videoprism_vision_model vilt vipllava vision-encoder-decoder vision-text-dual-encoder "
    "visual_bert vit vit_mae vit_msn vitdet vivit vjepa2 voxtral voxtral_encoder "
    "voxtral_realtime_encoder wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm whisper xclip "
    "xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod yolos yoso youtu zamba zamba2 zaya "
)
BUILT: tuple[str, ...] = tuple(_BUILT.split())
"""Model types that build at toy size and give a finite loss."""

_REASONS: dict[str, str] = {
    "forward wants an inference session, not tensors": (
        "edgetam_video sam2_video sam3_tracker_video sam3_video "
    ),
    "its validator ties sizes that the shrink rules do not know": (
        "depth_pro dots3_note efficientloftr gemma4_assistant gemma4_unified_assistant "
        "nemo_speechlm nemotron3_5_transcribe_audio nemotron3_diarization "
    ),
    "loss is nan at toy size": "align",
    "needs detectron2": "layoutlmv2",
    "needs natten": "dinat",
    "needs scipy": "eomt eomt_dinov3 inkling_mm_model maskformer oneformer videomt",
    "needs timm": (
        "fast_vlm gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder pe_video "
        "pe_video_encoder perception_lm timm_backbone timm_wrapper "
    ),
    "needs torchaudio": "higgs_audio_v2_tokenizer",
    "no forward of its own": "bark glm_image_vqmodel",
    "over 2 M parameters: widths are fixed in its code or sub-configurations": (
        "deepseek_ocr2 neucodec pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv6_small_det uvdoc xcodec2 "
    ),
    "refuses a backward in eval mode": "reformer",
    "sizes fixed in code disagree with a toy image or width": (
        "clap clvp edgetam edgetam_vision_model gemma4_audio granite4_vision kimi_k25_vision "
        "lightglue pp_doclayout_v2 pp_doclayout_v3 pp_ocrv5_server_det pp_ocrv5_server_rec "
        "pp_ocrv6_medium_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec sam2 sam2_hiera_det_model "
        "sam2_vision_model sam3_tracker tvp "
    ),
    "taps layers beyond the second of its backbone": (
        "chmv2 depth_anything lw_detr prompt_depth_anything tipsv2_dpt zoedepth "
    ),
    "training is not implemented": "vits",
    "transducer: its joint network wants decoder inputs": (
        "nemotron3_5_asr nemotron_asr_streaming parakeet_rnnt parakeet_tdt "
    ),
    "upstream: the auto-mapping names a class or a type that does not exist": (
        "rf_detr voxtral_realtime_text "
    ),
    "upstream: the configuration lacks a field that the model reads": "t5gemma2_encoder",
    "wants inputs that only its processor makes": (
        "flava gemma4_vision hunyuan_vl_vision inkling2_vision instructblipvideo "
        "kyutai_speech_to_text minicpm_ocr_vision minicpmv4_7_vision muse_glimmer_assistant "
        "nemotron3_5_transcribe_word_timestamp omdet-turbo pi0 qwen3_asr_encoder seggpt "
        "voxtral_realtime xcodec "
    ),
}
UNBUILT: dict[str, str] = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Model types of the auto-mappings that are left out, each with the reason."""

_REAL = (
    "data2vec-audio deformable_detr diffllama encodec fastspeech2_conformer "
    "fastspeech2_conformer_with_hifigan grounding-dino hubert imagegpt levit mask2former "
    "mm-grounding-dino musicgen musicgen_melody sew sew-d speech-encoder-decoder speecht5 "
    "unispeech unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm xlnet "
)
REAL_ON_META: dict[str, str] = dict.fromkeys(
    _REAL.split(), "torch.Tensor(...), torch.FloatTensor(...) and the like ignore the default device"
)
"""Models that keep some tensors on the CPU when built under meta; the cause is upstream."""
