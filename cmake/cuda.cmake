# Compiles every *_cuda.cu with nvcc into machine code for TM_CUDA_ARCHS. Custom commands call nvcc,
# because CMake's CUDA language fails on a missing or broken toolkit, and because the same sources
# are also compiled as C++ for the emulator.
#
# tm_find_cuda(): sets TM_HAVE_CUDA, and where true TM_NVCC, TM_CUDA_INCLUDE, TM_CUDART.
# tm_cuda_objects(var, sources...): objects in build/cuda/, and beside each the report of ptxas -v
# (x.ptxas).
set(TM_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where nvcc is found and works), ON or OFF")
# Drivers compile the virtual one for GPUs newer than all of the others (Blackwell), at first use.
set(TM_CUDA_ARCHS "80-real;89-real;90a-real;90-virtual" CACHE STRING
  "GPU architectures, as CMake names them")
set_property(CACHE TM_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT TM_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "TM_CUDA: got '${TM_CUDA}', expected AUTO, ON or OFF")
endif()

# Returns folders that may hold bin/nvcc: those that the user named, the usual one, the wheels'.
function(tm_cuda_roots out)
  set(roots "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
  find_program(tm_nvcc_in_path nvcc)
  if(tm_nvcc_in_path)
    get_filename_component(real ${tm_nvcc_in_path} REALPATH)
    get_filename_component(root ${real}/../.. ABSOLUTE)
    list(APPEND roots ${root})
  endif()
  unset(tm_nvcc_in_path CACHE)
  list(APPEND roots /usr/local/cuda)
  if(Python_EXECUTABLE)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import site, sysconfig; \
print(';'.join([sysconfig.get_path('purelib'), *site.getsitepackages()]))"
      OUTPUT_VARIABLE sites OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(REMOVE_DUPLICATES sites)
    foreach(site IN LISTS sites)
      list(APPEND roots ${site}/nvidia/cu13 ${site}/nvidia/cuda_nvcc)
    endforeach()
  endif()
  list(REMOVE_ITEM roots "")
  list(REMOVE_DUPLICATES roots)
  set(${out} ${roots} PARENT_SCOPE)
endfunction()

# Returns the folder of the toolkit that `nvcc` uses, which may be a script that calls another.
function(tm_nvcc_root out)
  set(probe ${CMAKE_BINARY_DIR}/cuda/probe.cu)
  file(WRITE ${probe} "#include <cuda_runtime.h>\n#include <concepts>\n__global__ void f() {}\n")
  execute_process(COMMAND ${TM_NVCC} --dryrun -c ${probe} OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(text MATCHES "#\\$ TOP=([^\n]+)")
    get_filename_component(root ${CMAKE_MATCH_1} REALPATH)
    set(${out} ${root} PARENT_SCOPE)
  else()
    set(${out} "" PARENT_SCOPE)
  endif()
endfunction()

# Tries `nvcc` with these architectures and this compiler. `why` is empty or the failure's text.
function(tm_try_nvcc why)
  set(probe ${CMAKE_BINARY_DIR}/cuda/probe)
  set(key "${TM_NVCC} ${TM_CUDA_FLAGS}")
  if(EXISTS ${probe}.ok)
    file(READ ${probe}.ok tried)
    if(tried STREQUAL key)
      set(${why} "" PARENT_SCOPE)
      return()
    endif()
  endif()
  execute_process(COMMAND ${TM_NVCC} ${TM_CUDA_FLAGS} -c ${probe}.cu -o ${probe}.o
    RESULT_VARIABLE failed OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(failed)
    string(STRIP "${text}" text)
    set(${why} "${TM_NVCC} does not work: ${text}" PARENT_SCOPE)
  else()
    file(WRITE ${probe}.ok "${key}")
    set(${why} "" PARENT_SCOPE)
  endif()
endfunction()

# -fmad=false: products and sums are fused where the source says fma and nowhere else, in every
# kernel that computes the same row, as -ffp-contract=off does in the emulator.
function(tm_cuda_flags out)
  set(flags -std=c++20 -O3 -fmad=false -ccbin ${CMAKE_CXX_COMPILER}
    -Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off -I${CMAKE_CURRENT_SOURCE_DIR}/cpp
    -DTM_CUDA_NS=cuda)
  foreach(arch IN LISTS TM_CUDA_ARCHS)
    if(NOT arch MATCHES "^([0-9]+[af]?)(-real|-virtual)?$")
      message(FATAL_ERROR "TM_CUDA_ARCHS: got '${arch}', expected for example 90a-real")
    endif()
    set(number ${CMAKE_MATCH_1})
    if(CMAKE_MATCH_2 STREQUAL "-real")
      set(code sm_${number})
    elseif(CMAKE_MATCH_2 STREQUAL "-virtual")
      set(code compute_${number})
    else()
      set(code [compute_${number},sm_${number}])
    endif()
    list(APPEND flags -gencode=arch=compute_${number},code=${code})
  endforeach()
  set(${out} ${flags} PARENT_SCOPE)
endfunction()

macro(tm_find_cuda)
  set(TM_HAVE_CUDA FALSE)
  set(tm_why "TM_CUDA is OFF")
  if(TM_CUDA STREQUAL "AUTO" AND TM_SANITIZE)
    set(tm_why "sanitizers are on")  # they check the emulated kernels
  elseif(NOT TM_CUDA STREQUAL "OFF")
    tm_cuda_roots(tm_roots)
    set(tm_beside "")  # folders beside the wheels' nvcc
    foreach(root IN LISTS tm_roots)
      list(APPEND tm_beside ${root}/../cuda_runtime)
    endforeach()
    list(JOIN tm_roots ", " tm_looked)
    find_program(TM_NVCC nvcc PATHS ${tm_roots} PATH_SUFFIXES bin NO_DEFAULT_PATH)
    if(TM_NVCC)
      tm_nvcc_root(tm_root)
      set(tm_roots ${tm_root} ${tm_roots})
    endif()
    find_path(TM_CUDA_INCLUDE cuda_runtime_api.h PATHS ${tm_roots} ${tm_beside}
      PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include NO_DEFAULT_PATH)
    find_file(TM_CUDART libcudart_static.a PATHS ${tm_roots} ${tm_beside}
      PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib NO_DEFAULT_PATH)
    set(tm_why "")
    foreach(part TM_NVCC TM_CUDA_INCLUDE TM_CUDART)
      if(NOT ${part})
        set(tm_why "no nvcc with cuda_runtime_api.h and libcudart_static.a (${part}) in: ${tm_looked}")
        unset(${part} CACHE)  # look again next time
        break()
      endif()
    endforeach()
    if(NOT tm_why)
      tm_cuda_flags(TM_CUDA_FLAGS)
      list(APPEND TM_CUDA_FLAGS -isystem ${TM_CUDA_INCLUDE})
      tm_try_nvcc(tm_why)
    endif()
    if(NOT tm_why)
      set(TM_HAVE_CUDA TRUE)
    elseif(TM_CUDA STREQUAL "ON")
      message(FATAL_ERROR "TM_CUDA=ON: ${tm_why}")
    endif()
  endif()
  if(TM_HAVE_CUDA)
    message(STATUS "CUDA kernels: ${TM_NVCC} for ${TM_CUDA_ARCHS}")
  else()
    message(STATUS "CUDA kernels: only emulated (${tm_why})")
  endif()
endmacro()

function(tm_cuda_objects out)
  set(TM_CUDA_COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${TM_NVCC} ${TM_CUDA_FLAGS} -Xptxas -v)
  set(settings ${CMAKE_BINARY_DIR}/cuda/nvcc_settings.cmake)
  configure_file(${CMAKE_CURRENT_SOURCE_DIR}/cmake/nvcc_settings.cmake.in ${settings} @ONLY)
  file(GLOB headers CONFIGURE_DEPENDS cpp/*/*.h)
  set(objects "")
  foreach(source IN LISTS ARGN)
    get_filename_component(name ${source} NAME_WE)
    set(object cuda/${name}.o)
    # Only Ninja reads the list of headers that nvcc writes, in every CMake since 3.18.
    if(CMAKE_GENERATOR MATCHES "Ninja")
      set(headers_of DEPFILE ${object}.d)
    else()
      set(headers_of DEPENDS ${headers})
    endif()
    add_custom_command(OUTPUT ${object} BYPRODUCTS cuda/${name}.ptxas
      COMMAND ${CMAKE_COMMAND} -DSETTINGS=${settings} -DSOURCE=${source} -DOBJECT=${object}
        -DREPORT=cuda/${name}.ptxas -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/nvcc_object.cmake
      WORKING_DIRECTORY ${CMAKE_BINARY_DIR}
      DEPENDS ${source} ${settings} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/nvcc_object.cmake
      ${headers_of}
      COMMENT "nvcc ${name}.cu" VERBATIM)
    list(APPEND objects ${CMAKE_BINARY_DIR}/${object})
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set(${out} ${objects} PARENT_SCOPE)
endfunction()
