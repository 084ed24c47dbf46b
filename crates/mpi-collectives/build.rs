//! Tells the linker what the shared library is called, and that it stays once it is loaded: an MPI
//! library may call the callbacks of this one until the end of the program.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmemferry_coll.so");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
