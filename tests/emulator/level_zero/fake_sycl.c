/* The five functions of libsycl that lead from a queue to Level Zero's handles. Their mangled names are plain
 * identifiers, so C can export them. A "sycl::queue" here is a pointer to a struct queue. */
#include <stdint.h>

struct queue {
  uint64_t context, device; /* Level Zero's */
  signed char backend;      /* 1: OpenCL, 2: Level Zero */
};

struct object {
  uint64_t handle;
};

/* Objects come back through a hidden first argument. */
void _ZNK4sycl3_V15queue11get_contextEv(struct object* result, struct queue* const* queue) {
  result->handle = (*queue)->context;
}
void _ZNK4sycl3_V15queue10get_deviceEv(struct object* result, struct queue* const* queue) {
  result->handle = (*queue)->device;
}
uint64_t _ZNK4sycl3_V17context9getNativeEv(const struct object* context) {
  return context->handle;
}
uint64_t _ZNK4sycl3_V16device9getNativeEv(const struct object* device) {
  return device->handle;
}
signed char _ZNK4sycl3_V15queue11get_backendEv(struct queue* const* queue) {
  return (*queue)->backend;
}
