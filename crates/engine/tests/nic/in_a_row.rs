//! The conformance suite over one engine, which has one channel: consecutive cases in one process,
//! as in `memferry bench devices`.

use memferry_engine::testing::conformance::{EngineUnderTest, run_case};

#[test]
fn a_case_has_given_the_channel_back_when_it_is_over() {
    let engine = crate::card::engine();
    let subject = EngineUnderTest::new(move || engine.clone());
    for _ in 0..200 {
        run_case(&subject, "a_park_returns_when_its_number_comes");
        run_case(&subject, "whoever_waits_for_a_number_is_told");
    }
}
