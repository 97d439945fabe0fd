// The functions of torch's stable C interface that the operators call, as torch 2.10 and every later one export them. Declared here so
// that building needs no torch; tests/python/test_torch_shim.py holds them against the headers of the torch at hand.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

using AOTITorchError = int32_t;  // 0: fine

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;  // an owned reference to a tensor unless said otherwise

class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;

// An argument or a result of an operator. int, float and bool of the schema are int64_t, double and bool in its lowest bytes, a Tensor is
// an AtenTensorHandle, whose reference passes to the receiver, an optional null or a pointer to the value, which passes likewise.
using StableIValue = uint64_t;

// Operators. An implementation finds its arguments on the stack and leaves its results there, from the bottom.
AOTITorchError aoti_torch_library_init_def(const char* ns, const char* file, uint32_t line, TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* key, const char* file, uint32_t line, TorchLibraryHandle* library);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name, void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t version);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle library);

// Tensors. Sizes, strides and data belong to the tensor.
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle tensor, int64_t* bytes);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* elements);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* type);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* index);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type,
                                        int32_t device_index, AtenTensorHandle* tensor);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_device_type_cuda();

AOTITorchError torch_get_num_threads(uint32_t* threads);
// Weak: a torch without CUDA has it not, and the operators load there all the same.
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

}  // extern "C"
