//! Tells the linker what the shared library is called, and that it stays once it is loaded: libfabric
//! unloads its providers at the end of the program, when threads of Memferry's may still run.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmemferry_fi.so");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
