# A version serves requests for itself and older ones with the same first number, and before 1.0 with the same
# first two numbers.

set(PACKAGE_VERSION "@VERSION@")
string(REGEX MATCH "^(0\\.[0-9]+|[1-9][0-9]*)" _adma_series "${PACKAGE_VERSION}")
string(REGEX MATCH "^(0\\.[0-9]+|[1-9][0-9]*|0)" _adma_wanted "${PACKAGE_FIND_VERSION}")

if(PACKAGE_FIND_VERSION VERSION_LESS_EQUAL PACKAGE_VERSION AND _adma_wanted STREQUAL _adma_series)
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
else()
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
endif()
if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
  set(PACKAGE_VERSION_EXACT TRUE)
endif()

unset(_adma_series)
unset(_adma_wanted)
