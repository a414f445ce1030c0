"""Arguments of Megatron-LM 0.12 to 0.20 that change neither which function a model computes nor its weights.

They are what its parsers of 0.12, 0.16, 0.19 and main (August 2026, which calls itself 0.20) accept, by the reason why
they change nothing. `OF_RUNS` are the attributes that Megatron-LM adds to the arguments of a run, and those that only
other releases have.
"""

from __future__ import annotations

_BY_REASON = {
    "experts: where tokens go, kernels, records and losses; which expert sees a token stays the same": """
        expert_model_parallel_size expert_tensor_parallel_size moe_aux_loss_coeff moe_combine_bwd_dtype
        moe_deepep_num_sms moe_dispatch_fwd_dtype moe_enable_deepep moe_enable_routing_replay
        moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_layer_recompute moe_ncclep_static_shape moe_ncclep_zero_copy
        moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference moe_paged_stash
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size
        moe_per_layer_logging moe_permute_fusion moe_permute_fusion_into_hybridep moe_router_bias_update_rate
        moe_router_dtype moe_router_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization
        moe_router_quantile_balancing_ema moe_routing_trace_capture_hidden_states
        moe_routing_trace_capture_logits moe_routing_trace_dump_weights moe_routing_trace_max_training_iters
        moe_routing_trace_path moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy
        moe_upcycling_granularity moe_use_grouped_tensor moe_use_legacy_grouped_gemm moe_use_upcycling
        moe_z_loss_coeff overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        save_tokens_per_expert_interval use_grouped_gemm_for_shared_expert
    """,
    "sizes and switches beside another argument, which must be neutral: attention, hybrids, predicted tokens, muP": """
        cache_mla_latents dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_use_sparse_loss dsa_kernel_backend gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute
        gdp_num_householder hybrid_context_parallel indexer_batch_size indexer_log_interval
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype mamba_training_ssm_states_dtype
        mhc_init_gating_factor mhc_num_residual_streams mhc_recompute_layer_num mhc_sinkhorn_iterations
        mla_down_proj_fusion mtp_detach_heads mtp_hsm mtp_loss_scaling_factor mtp_standalone
        mup_attn_scale_power mup_base_head_dim mup_base_hidden_size num_speculative_tokens
        relative_attention_max_distance relative_attention_num_buckets retro_attention_gate
        retro_cyclic_train_iters retro_encoder_attention_dropout retro_encoder_hidden_dropout
        retro_encoder_layers retro_num_neighbors retro_num_retrieved_chunks retro_project_dir
        retro_verify_neighbor_count use_mamba_mem_eff_path
    """,
    "another name of an argument, which `arguments.normalise` reads, or one that a family's own says": """
        add_position_embedding apply_layernorm_1p decoder_num_layers decoder_seq_length
        deprecated_use_mcore_models encoder_num_layers encoder_seq_length model_parallel_size norm_epsilon
        null_tokenizer_eod_id null_tokenizer_pad_id padded_vocab_size seq_length transformer_impl
        use_rotary_position_embeddings
    """,
    "layouts and communication": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split align_grad_reduce
        align_param_gather async_tensor_model_parallel_allreduce ckpt_fully_parallel_load
        ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save
        ckpt_fully_parallel_save_deprecated ckpt_fully_parallel_save_process_group
        clone_scatter_output_in_embedding context_parallel_size cp_comm_type create_all_gather_group
        data_parallel_random_init data_parallel_sharding_strategy data_sharding ddp_average_in_collective
        ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw
        ddp_param_name_patterns_for_fp32_local_accumulation ddp_reduce_scatter_with_fp32_accumulation
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers disable_symmetric_registration
        distributed_backend enable_full_sharding_in_hsdp enable_gloo_process_groups
        encoder_pipeline_model_parallel_size encoder_tensor_model_parallel_size
        ep_overlap_early_attn_memory_release fp4_param_gather fp8_param_gather
        fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration grad_reduce_in_bf16
        gtp_expert_remat_nccl_ub gtp_remat_nccl_ub gtp_remat_opt_in_modules
        gtp_remat_reduce_scatter_with_fp32_accumulation hierarchical_context_parallel_sizes
        inference_fuse_tp_communication keep_fp8_transpose_cache_when_using_custom_fsdp
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer
        megatron_fsdp_version microbatch_group_size_per_vp_stage nccl_all_reduce_for_prefill
        nccl_communicator_config_path nccl_ub num_layers_per_virtual_pipeline_stage
        num_virtual_stages_per_pipeline_rank outer_dp_sharding_strategy overlap_cpu_optimizer_d2h_h2d
        overlap_grad_reduce overlap_p2p_comm overlap_p2p_comm_warmup_flush overlap_param_gather
        overlap_param_gather_with_optimizer_step pipeline_model_parallel_comm_backend
        pipeline_model_parallel_layout pipeline_model_parallel_size pipeline_model_parallel_split_rank
        rl_inference_pipeline_model_parallel_size rl_inference_tensor_model_parallel_size
        rl_parallel_generation_tasks scatter_gather_tensors_in_pipeline sequence_parallel sharp_enabled_group
        strict_fsdp_dtensor_load suggested_communication_unit_size symmetric_ar_type tensor_model_parallel_size
        torch_fsdp2_reshard_after_forward tp_comm_bootstrap_backend tp_comm_bulk_dgrad tp_comm_bulk_wgrad
        tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_split_rs use_custom_fsdp use_gloo_process_groups use_megatron_fsdp
        use_ring_exchange_p2p use_sharp use_torch_fsdp2
    """,
    "checkpoints, logs, profiles and faults": """
        activation_offload_fraction app_tag_run_name app_tag_run_version async_ckpt_cpu_priority
        async_ckpt_io_priority async_ckpt_use_cpu_shm async_save auto_detect_ckpt_format barrier_with_L1_time
        bert_load calc_ft_timeouts check_weight_hash_across_dp_replicas_interval checkpoint_activations
        ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format ckpt_drop_redundant_extra_state ckpt_format
        ckpt_fully_parallel_load_per_rank_objects ckpt_load_validate_sharding_integrity
        ckpt_pg_tensors_cache_create ckpt_pg_tensors_cache_path ckpt_step config_logger_dir
        cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers create_attention_mask_in_dataloader
        dataloader_defer_npy_index_mmap dataloader_fast_cache_load dataloader_inter_document_masking
        dataloader_type delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks
        disable_msc_deprecated disable_straggler_on_startup dist_ckpt_format_deprecated
        dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness dist_ckpt_workers
        distribute_saved_activations empty_unused_memory_level enable_ft_package enable_msc enable_one_logger
        error_injection_rate error_injection_type exit_duration_in_mins exit_interval exit_on_missing_checkpoint
        exit_signal exit_signal_handler exit_signal_handler_for_dataloader exit_signal_handler_for_training
        fault_injector_delay_start_iteration fault_injector_fault_delay fault_injector_fault_probabilities
        fault_injector_fault_types fault_injector_mtti_seconds fault_injector_num_ranks
        fault_injector_offset_seconds fault_injector_ranks fault_injector_seed
        fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads
        flight_recorder_dump_on_timeout flight_recorder_dump_path flight_recorder_extra_dump_on_exec
        flight_recorder_include_only_active flight_recorder_include_stack_trace
        flight_recorder_trace_buffer_size ft_num_warmup_iters grpo_iterations ict_load
        inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_unified_memory_level inference_logging_step_interval
        inference_text_gen_server_logging inference_wandb_logging inprocess_active_world_size
        inprocess_barrier_timeout inprocess_completion_timeout inprocess_empty_cuda_cache inprocess_granularity
        inprocess_hard_timeout inprocess_heartbeat_interval inprocess_heartbeat_timeout inprocess_last_call_wait
        inprocess_max_iterations inprocess_monitor_process_interval inprocess_monitor_thread_interval
        inprocess_progress_watchdog_interval inprocess_restart inprocess_soft_timeout
        inprocess_termination_grace_time iterations_to_skip load load_main_params_from_ckpt
        log_device_memory_used log_energy log_interval log_loss_scale_to_tensorboard log_max_attention_logit
        log_memory_interval log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm log_progress
        log_straggler log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard
        log_world_size_to_tensorboard logging_level logits_load_decode_threads logits_load_dir
        logits_load_ignore_errors logits_load_kd_loss_alpha logits_load_msc_prefetch_depth
        logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p
        logits_save_top_p_min_k memory_snapshot_path metadata_path min_offloaded_tensor_size no_load_optim
        no_load_rng no_save_optim no_save_rng non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval nvtx_ranges
        object_storage_cache_path offload_modules one_logger_async one_logger_project one_logger_run_name
        optimizer_cpu_offload optimizer_offload_fraction otel_enabled otel_service_name otel_span_groups
        override_ckpt_iteration phase_transition_iterations pretrained_checkpoint profile profile_ranks
        profile_step_end profile_step_start pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra
        pytorch_profiler_collect_shapes record_memory_history record_shapes rerun_mode
        result_rejected_tracker_filename rl_default_temperature rl_default_top_k rl_default_top_p
        rl_inference_logprobs_is_correction rl_inference_model_unified_memory_level
        rl_offload_inference_model_weights_when_idle rl_offload_kv_cache_during_training
        rl_offload_optimizer_during_inference rl_profile rl_profile_dir rl_verify_model_weights_swap
        run_workload_inspector_server save save_activations_interval save_dgrads_interval save_interval
        save_params_interval save_retain_interval save_tokenizer_assets save_wgrads_interval
        sft_tokenizer_prompt_format straggler_ctrlr_port straggler_minmax_count stream_ckpt_dequant
        tensorboard_dir tensorboard_log_interval tensorboard_queue_size timing_log_level timing_log_option
        tokenizer_metadata use_checkpoint_args use_checkpoint_opt_param_scheduler use_dist_ckpt_deprecated
        use_mp_args_from_checkpoint_args use_persistent_ckpt_worker use_pytorch_profiler
        use_tokenizer_model_from_checkpoint_args use_torch_optimizer_for_cpu_offload verify_integrity
        wandb_entity wandb_exp_name wandb_project wandb_save_dir
    """,
    "data and tokenizers": """
        allow_ambiguous_pad_tokens bert_binary_head bert_embedder_type block_data_path calculate_per_token_loss
        chat_template data_args_path data_cache_path data_path data_per_class_fraction embedding_path
        eod_mask_loss eval_global_batch_size eval_interval eval_iters eval_micro_batch_size evidence_data_path
        fim_data fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token
        fim_rate fim_split_sample fim_spm_rate fim_suffix_token full_validation ict_head_size
        inference_cuda_graph_max_tokens inference_dynamic_batching_block_size
        inference_dynamic_batching_cuda_graph_max_tokens inference_dynamic_batching_max_tokens
        inference_dynamic_batching_max_tokens_override inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_track_generated_token_events inference_max_seq_length
        inference_moe_token_dispatcher_type legacy_tokenizer make_vocab_size_divisible_by manual_gc_eval
        mask_factor mask_prob mask_type masked_softmax_fusion max_tokens_to_oom merge_file
        mid_level_dataset_surplus mmap_bin_files mock_data multiple_validation_sets muon_split_qkv
        num_dataset_builder_threads num_workers offset_sampling_seed_by_dp_rank output_bert_embeddings
        pad_vocab_size per_dataset_sequences_path per_split_data_args_path query_in_block_prob
        reset_attention_mask reset_position_ids retriever_seq_length rl_prompts_per_eval rl_reset_cuda_graphs
        rl_skip_bos_token s3_cache_path sample_rate sft short_seq_prob special_tokens split start_eval_at_iter
        test_data_path tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens titles_data_path
        tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast
        tokenizer_hf_use_fast tokenizer_model tokenizer_sentencepiece_ignore_extra_whitespaces
        tokenizer_sentencepiece_legacy tokenizer_special_tokens tokenizer_type train_data_path trust_remote_code
        use_gigatoken valid_data_path validation_set_names vocab_extra_ids vocab_file
    """,
    "training: optimizer, schedule, losses, initialisation, reinforcement learning": """
        accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 adam_eps adlr_autoresume
        adlr_autoresume_interval apply_wd_to_qk_layernorm batch_size check_for_large_grads
        check_for_nan_in_loss_and_grad check_for_spiky_loss clip_grad cross_entropy_loss_fusion
        cuda_graph_warmup_steps decoupled_lr decoupled_min_lr decrease_batch_size_if_needed
        defer_embedding_wgrad_compute delay_wgrad_compute dino_freeze_last_layer dino_warmup_teacher_temp
        dino_warmup_teacher_temp_epochs distributed_timeout_seconds_after_init embedding_init_method_std
        end_weight_decay exp_avg_dtype exp_avg_sq_dtype finetune fp8_wgrad freeze_all_layers global_batch_size
        grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight grpo_filter_groups_with_same_reward
        grpo_group_size grpo_kl_beta grpo_prompts_per_step head_lr_mult hysteresis inference_max_batch_size
        init_method_std init_method_xavier_uniform init_model_with_meta_device initial_loss_scale
        langrl_env_config langrl_external_server langrl_inference_server_conversation_template
        langrl_inference_server_type lazy_mpu_init lion_beta1 lion_beta2 loss_scale loss_scale_window lr
        lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters
        lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style main_grads_dtype
        main_params_dtype micro_batch_size min_loss_scale min_lr mlp_chunks_for_training muon_coefficient_type
        muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_nesterov muon_num_ns_steps
        muon_scalar_optimizer muon_scale_mode muon_tp_mode muon_use_nesterov muon_use_syrk
        no_weight_decay_cond_type num_distributed_optimizer_instances optimizer optimizer_cuda_graph
        perform_initialization perform_rl_step qk_clip qk_clip_alpha qk_clip_threshold rampup_batch_size
        refit_method rl_consumption_granularity rl_durable_rollout_bank rl_generation_lag
        rl_importance_sampling_truncation_coef rl_inference_parsers rl_kv_cache_management_mode
        rl_max_inflight_requests rl_partial_rollouts rl_persist_cuda_graphs rl_remove_kv_cache_during_training
        rl_rollout_bank_dir rl_rollout_bank_max_bytes rl_sequence_packing_algo
        rl_sequence_packing_max_sequences_per_bin rl_submission_granularity rl_training_cuda_graphs
        rl_use_sequence_packing seed sgd_momentum skip_train start_weight_decay step_batch_size_schedule
        train_iters train_samples train_sync_interval use_cpu_initialization use_distributed_optimizer
        use_precision_aware_optimizer vision_pretraining vision_pretraining_type warmup weight_decay
        weight_decay_incr_style wgrad_deferral_limit
    """,
    "precision": """
        attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul first_last_layers_bf16
        fp16_lm_cross_entropy fp32_residual_connection fp4 fp4_param fp4_quantizer_factory fp4_recipe fp8
        fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_output_proj fp8_quantizer_factory
        fp8_recipe keep_fp8_transpose_cache logit_dtype num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
        reuse_grad_buf_for_mxfp8_param_ag
    """,
    "inference": """
        cuda_graph_impl cuda_graph_modules cuda_graph_scope cuda_graph_scope_deprecated decode_only_cuda_graphs
        disable_chunked_prefill enable_chunked_prefill enable_cuda_graph external_cuda_graph flash_decode
        inference_batch_times_seqlen_threshold inference_coordinator_port inference_cuda_graph_all_prefills
        inference_cuda_graph_scope inference_disable_ep_consensus inference_disable_triton_nvls_kernels
        inference_dynamic_batching inference_dynamic_batching_async_sched_mode
        inference_dynamic_batching_buffer_guaranteed_fraction inference_dynamic_batching_buffer_overflow_factor
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_enable_prefix_caching inference_dynamic_batching_max_requests
        inference_dynamic_batching_max_requests_override inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_sampling_backend
        inference_dynamic_batching_track_paused_request_events inference_grouped_gemm_backend
        inference_max_requests inference_moe_disable_fused_quant_kernels inference_rng_tracker inference_shards
        inference_use_synchronous_zmq_collectives mlp_chunks_for_prefill replication replication_factor
        replication_jump
    """,
    "kernels, fusions, recomputation and offloading": """
        apply_rope_fusion attention_backend batch_invariant_backend batch_invariant_mode bias_swiglu_fusion
        cross_entropy_fusion_impl deterministic_mode disable_jit_fuser flash_attention_version
        fused_residual_rmsnorm gpu_sniff_test_interval gradient_accumulation_fusion gradient_reduce_div_fusion
        kitchen_attention_backend manual_gc manual_gc_interval no_persist_layer_norm pin_cpu_grads
        pin_cpu_params recompute_activations recompute_granularity recompute_method recompute_modules
        recompute_num_layers te_rng_tracker use_flash_attn use_fused_weighted_squared_relu
        use_grouped_gemm_for_dense_mlp use_transformer_engine_op_fuser
    """,
    "vision and other models": """
        biencoder_projection_dim biencoder_shared_query_context_model classes_fraction dino_bottleneck_size
        dino_head_hidden_size dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp
        img_h img_w iter_per_epoch num_channels num_classes patch_dim retriever_report_topk_accuracies
        retriever_score_scaling swin_backbone_type use_one_sent_docs vision_backbone_type
    """,
    "how a run goes: processes, records and switches of old versions": """
        apply_query_key_layer_scaling async_strategy distrib_optim_fully_reshardable_mem_efficient
        distributed_timeout_minutes dump_param_to_param_group_map enable_experimental fake_process_group
        high_priority_a2a_comm_stream high_priority_stream_groups local_rank max_seqlen_per_dp_cp_rank onnx_safe
        override_opt_param_scheduler test_mode use_layer_wise_param_layout use_legacy_static_engine
        use_tp_pp_dp_mapping yaml_cfg
    """,
}

WITHOUT_EFFECT = tuple(name for names in _BY_REASON.values() for name in names.split())

OF_RUNS = frozenset(
    """
    DDP_impl _is_global_batch_size_explicitly_specified activations_checkpoint_method
    activations_checkpoint_num_layers allow_transformer_engine ammo_convert_te_to_local_spec
    ammo_load_classic_megatron_to_mcore ammo_quant_cfg bert_no_binary_head consumed_train_bins
    consumed_train_samples consumed_valid_samples cpu_offloading curr_iteration data_impl data_parallel_size
    delay_grad_reduce delay_param_gather disable_mamba_mem_eff_path dist_ckpt_format
    distribute_checkpointed_activations do_test do_train
    do_valid env_config expert_gtp_weight_remat_size export_default_te_spec export_force_local_attention
    export_kd_cfg export_kd_finalize export_kd_teacher_ckpt_format export_kd_teacher_load
    export_kd_teacher_model_config export_kv_cache_quant export_legacy_megatron export_model_type
    export_offline_model export_quant_cfg export_real_quant_cfg export_te_mcore_model finetune_data_files
    finetune_data_split finetune_hf_dataset fp4_format fp8_format freeze_base_for_mtp grpo_default_temperature
    grpo_default_top_p grpo_samples_per_iteration gtp_weight_remat_size inference_ckpt_non_strict
    inference_dynamic_batching_chunk_size inference_dynamic_batching_prefix_caching iteration
    load_model_opt_format log_batch_size_to_tensorboard log_learning_rate_to_tensorboard
    microbatch_group_size_per_virtual_pipeline_stage mmap_warmup model_type modelopt_enabled
    moe_routing_trace_max_inference_steps moe_token_dropping muon_no_split_qkv
    num_floating_point_operations_so_far one_logger_entity overlap_p2p_communication_warmup_flush
    override_lr_scheduler params_dtype persistent_save_interval qad_train_target rank renormalize_blend_weights
    retro_bert_tokenizer_type retro_bert_vocab_file retro_block_size retro_chunk_length retro_neighbor_dirs
    retro_no_verify_neighbor_count retro_return_doc_ids retro_split_preprocessing retro_workdir
    rl_calculate_intra_group_similarity rl_enforce_generation_order rl_generation_batch_size
    rl_num_parallel_generation_batches rl_num_parallel_generations rl_sequence_packing_bin_size
    skipped_train_samples standalone_embedding_stage teacher_model_config torch_fsdp2_no_reshard_after_forward
    transformer_pipeline_model_parallel_size use_checkpoint_lr_scheduler use_contiguous_buffers_in_local_ddp
    use_dist_ckpt use_layer_wise_distributed_optimizer use_mcore_models use_nccl_ub
    use_same_sampling_seed_across_dp_ranks variable_seq_lengths virtual_pipeline_model_parallel_size world_size
    """.split()  # noqa: SIM905 - names on ten lines
)
