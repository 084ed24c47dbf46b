use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

/// How often anybody measured.
static MEASURED: AtomicU32 = AtomicU32::new(0);

#[derive(Debug, PartialEq)]
struct Height {
    origin: Origin,
    metres: f64,
}

impl Saved for Height {
    const FIRST_WORD: &'static str = "height";

    fn path(named: &Path, _: bool) -> PathBuf {
        named.with_extension("height")
    }

    fn cores() -> usize {
        3
    }

    fn built_in() -> Self {
        Self { origin: Origin::BuiltIn, metres: 1.0 }
    }

    fn measure() -> Result<Self, NotMeasured> {
        MEASURED.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        Ok(Self { origin: Origin::Measured, metres: 2.5 })
    }

    fn found(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    fn to_entries(&self) -> String {
        format!("metres {}\n", self.metres)
    }

    fn from_entries(entries: &Entries<'_>) -> Result<Self, String> {
        Ok(Self { origin: Origin::BuiltIn, metres: entries.number("metres")? })
    }
}

#[test]
fn values_are_read_back_as_they_were() {
    let height = Height { origin: Origin::BuiltIn, metres: 8.25 };
    assert_eq!(from_text(&to_text(&height)), Ok(Some(height)));
}

#[test]
fn a_file_of_another_machine_counts_for_nothing_and_other_text_is_an_error() {
    assert_eq!(from_text::<Height>("height 0.0.0 99 some other processor\n"), Ok(None));
    assert!(from_text::<Height>("heights 1 2 3\n").is_err());
    let good = to_text(&Height::built_in());
    for value in ["-3", "soon", "inf", "NaN"] {
        let broken = good.replace("metres 1", &format!("metres {value}"));
        assert!(from_text::<Height>(&broken).is_err(), "{value}");
    }
}

#[test]
fn of_many_that_start_together_one_measures_for_all() {
    let folder = tempfile::tempdir().unwrap();
    let source = ProfileSource::File(folder.path().join("deep").join("named"));
    let heights: Vec<Height> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| load(&source).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(MEASURED.load(Ordering::Relaxed), 1);
    assert!(heights.iter().all(|height| height.metres == 2.5));
    let file = folder.path().join("deep").join("named.height");
    assert_eq!(heights.iter().filter(|height| height.origin == Origin::Measured).count(), 1);
    assert_eq!(load::<Height>(&source).unwrap().origin, Origin::Saved(file.clone()));
    let left: Vec<_> = fs::read_dir(file.parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing is left behind but the file");
}

/// Something whose measurements are told beforehand, on each thread for itself.
#[derive(Debug, Clone, PartialEq)]
struct Weight {
    origin: Origin,
    grams: f64,
}

thread_local! {
    static SCALES: std::cell::RefCell<Vec<Result<f64, NotMeasured>>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// What the next measurements of this thread give, the last one first.
fn next_weights(weights: &[Result<f64, NotMeasured>]) {
    SCALES.set(weights.to_vec());
}

fn busy() -> NotMeasured {
    check_contention(0.42).unwrap_err()
}

impl Saved for Weight {
    const FIRST_WORD: &'static str = "weight";

    fn path(named: &Path, _: bool) -> PathBuf {
        named.to_owned()
    }

    fn cores() -> usize {
        3
    }

    fn built_in() -> Self {
        Self { origin: Origin::BuiltIn, grams: 1.0 }
    }

    fn measure() -> Result<Self, NotMeasured> {
        let next = SCALES.with_borrow_mut(|scales| scales.pop().expect("nobody measures now"));
        next.map(|grams| Self { origin: Origin::Measured, grams })
    }

    fn implausible(&self) -> Option<String> {
        (self.grams > 1000.0).then(|| "nothing is so heavy".into())
    }

    fn found(self, origin: Origin) -> Self {
        Self { origin, ..self }
    }

    fn to_entries(&self) -> String {
        format!("grams {}\n", self.grams)
    }

    fn from_entries(entries: &Entries<'_>) -> Result<Self, String> {
        Ok(Self { origin: Origin::BuiltIn, grams: entries.number("grams")? })
    }
}

fn load_weight(path: &Path) -> Weight {
    load(&ProfileSource::File(path.to_owned())).unwrap()
}

#[test]
fn others_that_have_the_processors_for_a_tenth_of_the_time_make_a_busy_machine() {
    assert_eq!(check_contention(0.0), Ok(()));
    assert_eq!(check_contention(0.1), Ok(()));
    let NotMeasured::Unreliable(why) = busy() else { panic!("it can be measured") };
    assert!(why.contains("42 %"), "{why}");
}

#[test]
fn a_quota_that_throttles_is_another_reason_than_a_busy_machine() {
    assert_eq!(check_throttling(0.1), Ok(()));
    let Err(NotMeasured::Unreliable(why)) = check_throttling(0.6) else { panic!("it is much") };
    assert!(why.contains("CPU quota") && why.contains("60 %") && !why.contains("others"), "{why}");
}

#[test]
fn what_was_measured_on_a_busy_machine_is_not_kept_and_not_tried_again_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weight");
    next_weights(&[Err(busy())]);
    let weight = load_weight(&path);
    let Origin::NotKept(why) = &weight.origin else { panic!("{weight:?}") };
    assert!(why.contains("busy") && weight.grams == 1.0, "{weight:?}");
    // The next process does not measure: it would find no scales.
    assert_eq!(load_weight(&path), weight);
}

#[test]
fn a_measurement_is_tried_again_a_minute_after_one_that_was_not_kept() {
    let now = SystemTime::now();
    let text = not_kept_text::<Weight>("busy", now);
    assert_eq!(not_kept_lately::<Weight>(&text, now), Some("busy".into()));
    assert_eq!(not_kept_lately::<Weight>(&text, now + RETRY_AFTER), None);
    assert_eq!(not_kept_lately::<Weight>(&text, now - RETRY_AFTER), None, "clocks are set back");
    assert_eq!(from_text::<Weight>(&text), Ok(None));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weight");
    fs::write(&path, not_kept_text::<Weight>("busy", now - RETRY_AFTER)).unwrap();
    next_weights(&[Ok(5.0)]);
    assert_eq!(load_weight(&path), Weight { origin: Origin::Measured, grams: 5.0 });
    assert_eq!(load_weight(&path), Weight { origin: Origin::Saved(path), grams: 5.0 });
}

#[test]
fn values_that_no_machine_has_are_neither_saved_nor_believed_when_they_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weight");
    let heavy = Weight { origin: Origin::Measured, grams: 1e6 };
    save(&heavy, &path).unwrap();
    next_weights(&[Ok(1e6)]);
    let weight = load_weight(&path);
    assert_eq!(weight.origin, Origin::NotKept("nothing is so heavy".into()));
    assert_eq!(weight.grams, 1.0);
    save(&heavy, &path).unwrap();
    next_weights(&[Ok(7.0)]);
    assert_eq!(load_weight(&path), Weight { origin: Origin::Measured, grams: 7.0 });
}
