//! Tells the linker what the shared library is called, that it stays once it is loaded, that its
//! initialiser comes before those of all others, and that all its symbols are bound at once: a call
//! that the loader has to bind first would take locks in places where none may be taken.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmemferry_preload.so");
    for flag in ["nodelete", "initfirst", "now"] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,{flag}");
    }
}
