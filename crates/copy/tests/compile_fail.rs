//! The safe calls leave no way to touch a buffer in flight: such programs do not compile.

#[test]
fn a_buffer_in_flight_cannot_be_touched() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
