#include "ops/dispatch.h"

#include "core/error.h"

namespace turbomind {

void check_dtype(const Context& ctx, const OpTypes& types, DType seen) {
  const DTypes accepted = types.of(ctx);
  if (accepted.has(seen)) return;
  throw_error(ErrorCode::internal, types.op, ": ", types.tensor, " is ", dtype_name(seen),
              ", expected ", accepted.names(), ctx.gpu ? " on a GPU" : " on the CPU");
}

}  // namespace turbomind
