// In place of torch's header of this name: the operators that autocast knows on the stand-in.
#pragma once
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/cross_entropy_loss_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/scaled_dot_product_attention_ops.h>

#define ATEN_FN2(name, overload) at::_ops::name##_##overload::call
#define ATEN_FN(name) at::_ops::name::call
