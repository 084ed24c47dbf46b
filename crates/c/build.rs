//! Tells the linker what the shared library is called, and that it stays once it is loaded: its
//! channels are threads, whose code must not be unmapped by a `dlclose`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libadma.so");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
