#include "bindings/bindings.h"
#include "cache/kv_layout.h"

PYBIND11_MODULE(_C, m) {
  using namespace turbomind::bindings;
  m.doc() =
      "The C++ core. Everything here speaks token ids; `turbomind.Engine` is the public face.";
  m.attr("__version__") = TM_VERSION;
  m.attr("PAGE_TOKENS") = turbomind::kPageTokens;
  bind_errors(m);
  bind_config(m);
  bind_options(m);
  bind_codes(m);
  bind_builder(m);
  bind_request(m);
  bind_engine(m);
  bind_page_store(m);
  bind_bench(m);
  bind_gpu(m);
  bind_testing(m);
}
