//! Tests of the C calls: the header, closing, and programs in C with both libraries.

mod closing;
mod header;
mod programs;
