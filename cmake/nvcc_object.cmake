# Runs nvcc from SOURCE to OBJECT. Its messages, the report of ptxas, go to REPORT, and to the
# terminal if it fails or warns.
include(${SETTINGS})
execute_process(COMMAND ${command} -MD -MF ${OBJECT}.d -MT ${OBJECT} -c ${SOURCE} -o ${OBJECT}
  RESULT_VARIABLE failed OUTPUT_VARIABLE text ERROR_VARIABLE text)
file(WRITE ${REPORT} "${text}")
if(failed OR text MATCHES "warning|error")
  message(STATUS "${text}")
endif()
if(failed)
  message(FATAL_ERROR "nvcc failed for ${SOURCE}")
endif()
