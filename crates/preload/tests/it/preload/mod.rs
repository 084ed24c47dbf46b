//! The library in programs: those of `tests/programs`, and programs of others.

#![cfg(all(target_arch = "x86_64", target_env = "gnu"))]

mod calls;
mod heap;
mod layout;
mod programs;
mod support;
