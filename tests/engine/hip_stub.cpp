// A runtime library for AMD GPUs without a GPU: what hip-python binds, each call handed on to
// Python (hip_runtime.py) with its name and arguments. Its name inside is the real library's, so
// hip-python takes it once it is loaded.
#include <cstddef>
#include <cstdint>

using Handler = int (*)(const char* name, const int64_t* arguments, int count);
static Handler handler;

extern "C" void stub_handler(Handler given) { handler = given; }

template <class... Arguments>
static int call(const char* name, Arguments... arguments) {
  const int64_t words[] = {int64_t(arguments)..., 0};
  return handler ? handler(name, words, int(sizeof...(arguments))) : 100;  // hipErrorNoDevice
}

extern "C" {
int hipInit(unsigned flags) { return call("hipInit", flags); }
int hipGetDeviceCount(int* out) { return call("hipGetDeviceCount", out); }
int hipGetDevicePropertiesR0600(void* out, int device) {
  return call("hipGetDeviceProperties", out, device);
}
int hipDeviceGet(int* out, int device) { return call("hipDeviceGet", out, device); }
int hipSetDevice(int device) { return call("hipSetDevice", device); }
int hipDeviceSynchronize() { return call("hipDeviceSynchronize"); }
int hipDeviceCanAccessPeer(int* out, int device, int peer) {
  return call("hipDeviceCanAccessPeer", out, device, peer);
}
int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
  return call("hipDeviceEnablePeerAccess", peer, flags);
}
int hipModuleLoadData(void** out, const void* image) {
  return call("hipModuleLoadData", out, image);
}
int hipModuleGetFunction(void** out, void* module, const char* name) {
  return call("hipModuleGetFunction", out, module, name);
}
int hipModuleUnload(void* module) { return call("hipModuleUnload", module); }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* function, int threads,
                                                       size_t bytes) {
  return call("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", out, function, threads, bytes);
}
int hipMalloc(void** out, size_t size) { return call("hipMalloc", out, size); }
int hipExtMallocWithFlags(void** out, size_t size, unsigned flags) {
  return call("hipExtMallocWithFlags", out, size, flags);
}
int hipFree(void* at) { return call("hipFree", at); }
int hipHostMalloc(void** out, size_t size, unsigned flags) {
  return call("hipHostMalloc", out, size, flags);
}
int hipHostFree(void* at) { return call("hipHostFree", at); }
int hipHostGetDevicePointer(void** out, void* at, unsigned flags) {
  return call("hipHostGetDevicePointer", out, at, flags);
}
int hipMemsetD8(void* to, unsigned char value, size_t count) {
  return call("hipMemsetD8", to, value, count);
}
int hipMemsetD32Async(void* to, int value, size_t count, void* stream) {
  return call("hipMemsetD32Async", to, value, count, stream);
}
int hipMemcpyHtoD(void* to, const void* from, size_t size) {
  return call("hipMemcpyHtoD", to, from, size);
}
int hipMemcpyDtoD(void* to, void* from, size_t size) {
  return call("hipMemcpyDtoD", to, from, size);
}
int hipMemcpyDtoH(void* to, void* from, size_t size) {
  return call("hipMemcpyDtoH", to, from, size);
}
int hipMemcpyHtoDAsync(void* to, const void* from, size_t size, void* stream) {
  return call("hipMemcpyHtoDAsync", to, from, size, stream);
}
int hipStreamCreateWithFlags(void** out, unsigned flags) {
  return call("hipStreamCreateWithFlags", out, flags);
}
int hipStreamDestroy(void* stream) { return call("hipStreamDestroy", stream); }
int hipStreamQuery(void* stream) { return call("hipStreamQuery", stream); }
int hipStreamSynchronize(void* stream) { return call("hipStreamSynchronize", stream); }
int hipModuleLaunchCooperativeKernel(void* function, unsigned blocks, unsigned blocks_y,
                                     unsigned blocks_z, unsigned threads, unsigned threads_y,
                                     unsigned threads_z, unsigned bytes, void* stream,
                                     void** arguments) {
  return call("hipModuleLaunchCooperativeKernel", function, blocks, blocks_y, blocks_z, threads,
              threads_y, threads_z, bytes, stream, arguments);
}
}
