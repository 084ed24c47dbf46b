//! Sets the soname of the shared library and keeps it loaded: its channels are threads, whose code
//! a `dlclose` must not unmap.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libadma.so");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
