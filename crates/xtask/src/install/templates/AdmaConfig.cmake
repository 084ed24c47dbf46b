# libadma of Memferry as imported targets: Adma::adma is shared, Adma::adma_static is there if the archive is.
# All paths follow from that of this file, so the installed folder may be moved.

get_filename_component(_adma_folder "${CMAKE_CURRENT_LIST_DIR}" REALPATH)
get_filename_component(_adma_prefix "${_adma_folder}/../../.." ABSOLUTE)

if(NOT TARGET Adma::adma)
  add_library(Adma::adma SHARED IMPORTED)
  set_target_properties(Adma::adma PROPERTIES
    IMPORTED_LOCATION "${_adma_prefix}/lib/libadma.so"
    IMPORTED_SONAME "libadma.so"
    INTERFACE_INCLUDE_DIRECTORIES "${_adma_prefix}/include")
endif()

if(NOT TARGET Adma::adma_static AND EXISTS "${_adma_prefix}/lib/libadma.a")
  add_library(Adma::adma_static STATIC IMPORTED)
  set_target_properties(Adma::adma_static PROPERTIES
    IMPORTED_LOCATION "${_adma_prefix}/lib/libadma.a"
    IMPORTED_LINK_INTERFACE_LANGUAGES "C"
    INTERFACE_LINK_LIBRARIES "gcc_s;util;rt;pthread;m;dl"
    INTERFACE_INCLUDE_DIRECTORIES "${_adma_prefix}/include")
endif()

unset(_adma_folder)
unset(_adma_prefix)
