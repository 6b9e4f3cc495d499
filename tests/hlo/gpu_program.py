"""A program for a GPU, written by hand as XLA prints them: every kind of GEMM, async pairs, updates in place."""

TEXT = """HloModule jit_step, is_scheduled=true

%gemm_fusion.1_computation (p0: bf16[64,128], p1: bf16[128,256]) -> bf16[64,256] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = bf16[128,256]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,256]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (u0: f32[4,64], u1: s32[], u2: f32[64]) -> f32[4,64] {
  %u0 = f32[4,64]{1,0} parameter(0)
  %u1 = s32[] parameter(1)
  %u2 = f32[64]{0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,64]{1,0} bitcast(%u2)
  ROOT %dus = f32[4,64]{1,0} dynamic-update-slice(%u0, %row, %u1, %zero)
}

%rows (r0: f32[4,64], r1: s32[]) -> f32[64] {
  %r0 = f32[4,64]{1,0} parameter(0)
  %r1 = s32[] parameter(1)
  %none = s32[] constant(0)
  %ds = f32[1,64]{1,0} dynamic-slice(%r0, %r1, %none), dynamic_slice_sizes={1,64}
  %flat = f32[64]{0} bitcast(%ds)
  ROOT %twice = f32[64]{0} add(%flat, %flat), metadata={op_name="jit(step)/quantize/add"}
}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%scatter_computation (s0: f32[512,64]) -> f32[64,64] {
  %s0 = f32[512,64]{1,0} parameter(0)
  ROOT %inner-scatter = f32[64,64]{1,0} reduce-scatter(%s0), channel_id=3, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%body (b: (s32[], bf16[64,128], bf16[128,256])) -> (s32[], bf16[64,128], bf16[128,256]) {
  %b = (s32[], bf16[64,128]{1,0}, bf16[128,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %a1 = bf16[64,128]{1,0} get-tuple-element(%b), index=1
  %w1 = bf16[128,256]{1,0} get-tuple-element(%b), index=2
  %ag.start = (bf16[64,128]{1,0}, bf16[512,128]{1,0}) all-gather-start(%a1), channel_id=1, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %gemm_fusion.1 = bf16[64,256]{1,0} fusion(%a1, %w1), kind=kCustom, calls=%gemm_fusion.1_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %ag.done = bf16[512,128]{1,0} all-gather-done(%ag.start)
  %ag2.start = (bf16[64,128]{1,0}, bf16[512,128]{1,0}) all-gather-start(%a1), channel_id=2, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}
  %after = bf16[64,256]{1,0} fusion(%a1, %w1), kind=kCustom, calls=%gemm_fusion.1_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %ag2.done = bf16[512,128]{1,0} all-gather-done(%ag2.start)
  ROOT %next = (s32[], bf16[64,128]{1,0}, bf16[128,256]{1,0}) tuple(%i, %a1, %w1)
}

%condition (c: (s32[], bf16[64,128], bf16[128,256])) -> pred[] {
  %c = (s32[], bf16[64,128]{1,0}, bf16[128,256]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: bf16[64,128], w: bf16[128,256], q: f4e2m1fn[64,128], v: f4e2m1fn[256,128], s: f8e4m3fn[64,8], t: f8e4m3fn[256,8], e: f8e4m3fn[64,128], g: f8e5m2[128,256], stack: f32[4,64], n: s32[], d: f32[512,64], qq: bf16[2,64,8,32], kk: bf16[2,64,4,32]) -> bf16[64,256] {
  %a = bf16[64,128]{1,0} parameter(0)
  %w = bf16[128,256]{1,0} parameter(1)
  %q = f4e2m1fn[64,128]{1,0} parameter(2)
  %v = f4e2m1fn[256,128]{1,0} parameter(3)
  %s = f8e4m3fn[64,8]{1,0} parameter(4)
  %t = f8e4m3fn[256,8]{1,0} parameter(5)
  %e = f8e4m3fn[64,128]{1,0} parameter(6)
  %g = f8e5m2[128,256]{1,0} parameter(7)
  %stack = f32[4,64]{1,0} parameter(8)
  %n = s32[] parameter(9)
  %d = f32[512,64]{1,0} parameter(10)
  %qq = bf16[2,64,8,32]{3,2,1,0} parameter(11)
  %kk = bf16[2,64,4,32]{3,2,1,0} parameter(12)
  %rs.start = ((f32[512,64]{1,0}), f32[64,64]{1,0}) async-start(%d), calls=%scatter_computation
  %fp4 = (bf16[64,256]{1,0}, u8[128]{0}) custom-call(%q, %v, %s, %t), custom_call_target="__cudnn$blockScaledDot"
  %f8 = (bf16[64,256]{1,0}, s8[4096]{0}) custom-call(%e, %g), custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %start = (s32[], bf16[64,128]{1,0}, bf16[128,256]{1,0}) tuple(%n, %a, %w)
  %loop = (s32[], bf16[64,128]{1,0}, bf16[128,256]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %fmha = (bf16[2,8,64,32]{3,2,1,0}, f32[2,8,64]{2,1,0}) custom-call(%qq, %kk, %kk), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"mask_type":"CAUSAL","intermediate_tensor_shape":{"dimensions":["2","8","64","64"]}}}
  %rs.done = f32[64,64]{1,0} async-done(%rs.start)
  %plain = (bf16[64,256]{1,0}, s8[4096]{0}) custom-call(%a, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %own = bf16[64,256]{1,0} custom-call(%a, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/gemm/mpmd_map"}, backend_config={kernel_hash = "x"}
  %row.read = f32[64]{0} fusion(%stack, %n), kind=kLoop, calls=%rows
  %stack.next = f32[4,64]{1,0} fusion(%stack, %n, %row.read), kind=kLoop, calls=%update
  %early.start = ((f32[4,64]{1,0}, s32[], f32[64]{0}), f32[4,64]{1,0}, u32[]) fusion-start(%stack, %n, %row.read), kind=kLoop, calls=%update
  %early.done = f32[4,64]{1,0} fusion-done(%early.start)
  %pass = (f4e2m1fn[64,128]{1,0}, f8e4m3fn[64,8]{1,0}) custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/quantize_rows/pallas_call"}, backend_config={name = "quantize_rows"}
  ROOT %out = bf16[64,256]{1,0} copy(%own)
}
"""  # noqa: E501
