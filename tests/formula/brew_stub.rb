# What a formula sees of brew: `ruby brew_stub.rb FORMULA PREFIX VERSION describe|install|test`.
# It runs in the folder that brew would run the step in.

require "English"
require "fileutils"
require "json"
require "pathname"

PREFIX = Pathname(ARGV.fetch(1))
KEG_VERSION = ARGV.fetch(2)

# As brew extends it.
class Pathname
  def install(*sources)
    mkpath
    sources.each { |source| FileUtils.mv(source, self) }
  end

  def write(content)
    raise "#{self} exists already" if exist?

    dirname.mkpath
    File.write(self, content)
  end
end

class Formula
  include FileUtils

  STANZAS = %i[desc homepage url sha256 license head depends_on].freeze

  class << self
    attr_reader :service_block

    def [](name) = new(name)
    def recorded = (@recorded ||= Hash.new { |stanzas, name| stanzas[name] = [] })
    def service(&block) = @service_block = block
    def test(&) = define_method(:test, &)

    STANZAS.each do |stanza|
      define_method(stanza) { |*values| recorded[stanza] << values }
    end
  end

  def initialize(name) = @name = name
  def prefix = PREFIX/"Cellar"/@name/KEG_VERSION
  def opt_prefix = PREFIX/"opt"/@name
  def bin = prefix/"bin"
  def libexec = prefix/"libexec"
  def opt_bin = opt_prefix/"bin"
  def opt_libexec = opt_prefix/"libexec"
  def var = PREFIX/"var"

  def assert_equal(wanted, found) = wanted == found || raise("#{found.inspect} is not #{wanted.inspect}")
  def assert_match(wanted, found) = wanted.match?(found) || raise("#{found.inspect} is not like #{wanted.inspect}")
  def shell_output(command, status = 0) = pipe_output(command, nil, status)

  def pipe_output(command, input = nil, status = nil)
    output = IO.popen(command, "w+") do |pipe|
      pipe.write(input)
      pipe.close_write
      pipe.read
    end
    assert_equal(status, $CHILD_STATUS.exitstatus) if status
    output
  end
end

class Service
  attr_reader :keys

  def initialize(formula)
    @formula = formula
    @keys = {}
    instance_eval(&formula.class.service_block)
  end

  def opt_bin = @formula.opt_bin
  def var = @formula.var
  def std_service_path_env = "#{PREFIX}/bin:#{PREFIX}/sbin:/usr/bin:/bin:/usr/sbin:/sbin"
  def method_missing(key, value) = @keys[key] = value
  def respond_to_missing?(*) = true
end

path = File.realpath(ARGV.fetch(0))
tap = Module.new
tap.module_eval(File.read(path), path)
formula = tap.const_get(tap.constants.first).new(File.basename(path, ".rb"))
case ARGV.fetch(3)
when "describe"
  puts JSON.generate(formula.class.recorded.merge(service: Service.new(formula).keys, caveats: formula.caveats))
else
  formula.public_send(ARGV.fetch(3))
end
